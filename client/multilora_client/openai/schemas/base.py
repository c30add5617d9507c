"""The base of all requests."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from multilora_client.openai.errors import unsupported

ModelName = Annotated[str, Field(max_length=1000)]
TokenIds = Annotated[list[int], Field(min_length=1)]


class Strict(BaseModel):
    """A JSON object that has nothing but its fields, each of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


def only(*honoured: object) -> AfterValidator:
    """Refuses every value but the honoured ones."""

    def check(value: object) -> object:
        if value not in honoured:
            raise unsupported(f"{json.dumps(value)} is not supported, only {' and '.join(map(json.dumps, honoured))}")
        return value

    return AfterValidator(check)


def refused(reason: str) -> AfterValidator:
    """Refuses every value that is given."""

    def check(value: object) -> object:
        raise unsupported(f"not supported: {reason}")

    return AfterValidator(check)
