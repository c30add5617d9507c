"""The base of all requests."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from multilora_client.openai.errors import quoted, unsupported

ModelName = Annotated[str, Field(max_length=1000)]
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]

NOTES = frozenset(
    {
        "annotations",
        "cache_control",
        "caller",
        "citations",
        "closed",
        "created",
        "created_at",
        "created_by",
        "encrypted_content",
        "executed_tools",
        "extra_content",
        "finish_reason",
        "hidden_states",
        "id",
        "index",
        "logprobs",
        "matched_stop",
        "metadata",
        "object",
        "parsed",
        "parsed_arguments",
        "phase",
        "prompt_cache_breakpoint",
        "prompt_token_ids",
        "provider",
        "provider_specific_fields",
        "reasoning_details",
        "reasoning_items",
        "reasoning_opaque",
        "search_results",
        "signature",
        "status",
        "stop_reason",
        "thinking_blocks",
        "thought_signature",
        "timestamp",
        "token_ids",
        "usage",
    }
)
"""Members of a conversation that other servers and SDKs write beside its texts.

The rule: a member is here if it tells how its part came about, where it is kept or how it is shown: then it is no word
of the conversation. It passes, whatever its value, and no chat template sees it. A member that is neither here nor a
field is refused: it may be a word of the conversation that this server cannot read.
"""


class Strict(BaseModel):
    """A JSON object that has nothing but its fields, each of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    notes: ClassVar[frozenset[str]] = frozenset()
    """Names of members that pass unread."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        """Nulls, and notes that are no fields of the class."""
        if not isinstance(data, dict):
            return data
        passed = cls.notes - cls.model_fields.keys()
        return {name: value for name, value in data.items() if value is not None and name not in passed}


class Told(Strict):
    """A part of a conversation, or of its tools, as other software wrote it."""

    notes = NOTES


def only(*honoured: object) -> AfterValidator:
    """Refuses every value but the honoured ones."""

    def check(value: object) -> object:
        if value not in honoured:
            raise unsupported(f"{quoted(value)} is not supported, only {' and '.join(map(quoted, honoured))}")
        return value

    return AfterValidator(check)


def refused(reason: str) -> AfterValidator:
    """Refuses every value that is given."""

    def check(value: object) -> object:
        raise unsupported(f"not supported: {reason}")

    return AfterValidator(check)
