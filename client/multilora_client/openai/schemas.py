"""Requests as OpenAI defines them. Every field is honoured, changes no answer, or is refused when it would.

A null is as good as not given. Unknown fields are refused, so that a parameter of tomorrow is not ignored today.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from multilora_client.messages import GenerateOptions
from multilora_client.openai.errors import unsupported

_UNLIMITED = 2**31 - 1  # the server ends an answer where the context does
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default
_NUM_SEEDS = 2**64
_MAX_STOP_WORDS = 16
_MAX_CHOICES = 128  # OpenAI's limit, and the server's
_MAX_TOP_LOGPROBS = 20  # OpenAI's limit for chats
_MAX_COMPLETION_LOGPROBS = 5  # and for completions
_MAX_BIASED_TOKENS = 1024

StopWord = Annotated[str, Field(min_length=1, max_length=1000)]
StopWords = Annotated[list[StopWord], Field(max_length=_MAX_STOP_WORDS)]
TokenIds = Annotated[list[int], Field(min_length=1)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


def _only(*honoured: object) -> AfterValidator:
    """Refuses every value but those that can be honoured."""

    def check(value: object) -> object:
        if value not in honoured:
            raise unsupported(f"{json.dumps(value)} is not supported, only {' and '.join(map(json.dumps, honoured))}")
        return value

    return AfterValidator(check)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # of OpenAI's network packets; the answer is the same


class _Sampling(_Strict):
    """What both kinds of request share. The last four are not OpenAI's, but what other servers have beside it."""

    model: str = Field(max_length=1000)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=_UNLIMITED)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopWord | StopWords = []
    n: int = Field(1, ge=1, le=_MAX_CHOICES)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=_MAX_BIASED_TOKENS)] = {}
    user: str | None = None
    top_k: int | None = Field(None, ge=0, le=_UNLIMITED)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0, le=_UNLIMITED)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream only")
        return self

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.stream and self.n > 1:
            raise unsupported(f"n {self.n} is not supported with stream, only 1")
        return self

    def sampling(self) -> GenerateOptions:
        """The options that both kinds share. A top_p of 0 leaves only the likeliest token; the server's 0 is unset."""
        is_greedy = self.temperature == 0 or self.top_p == 0
        return GenerateOptions(
            temperature=0.0 if is_greedy else self.temperature,
            top_p=None if is_greedy else self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            logit_bias={int(token_id): bias for token_id, bias in self.logit_bias.items()},
            seed=None if self.seed is None else self.seed % _NUM_SEEDS,
            num_return_sequences=self.n if self.n > 1 else None,
            presence_penalty=self.presence_penalty or None,
            frequency_penalty=self.frequency_penalty or None,
            stop_words=[self.stop] if isinstance(self.stop, str) else self.stop,
        )


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One turn. `developer` is what newer models of OpenAI call `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, object]:
        """As chat templates know it: one text, and only what was given."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return self.model_dump(exclude_none=True) | {"role": role, "content": text}


class JsonSchema(_Strict):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and that type needs it")
        return self

    def guide(self) -> GenerateOptions:
        if self.json_schema is not None:
            return GenerateOptions(guide_type="json_schema", guide=json.dumps(self.json_schema.schema_))
        return GenerateOptions(guide_type="json") if self.type == "json_object" else GenerateOptions()


class ChatRequest(_Sampling):
    """POST /v1/chat/completions. Tools go to the chat template; a call comes back as the text the model wrote."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_UNLIMITED)
    response_format: ResponseFormat = ResponseFormat(type="text")
    tools: list[dict[str, Any]] = []
    tool_choice: Annotated[str | dict[str, Any], _only("auto", "none")] = "auto"
    parallel_tool_calls: Annotated[bool, _only(True)] = True
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=_MAX_TOP_LOGPROBS)
    metadata: dict[str, Any] | None = None
    store: Annotated[bool, _only(False)] = False
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens contradict each other")
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs only")
        return self

    @property
    def text(self) -> None:
        """A chat has no prompt of one text."""

    @property
    def includes_logprobs(self) -> bool:
        return self.logprobs

    def options(self) -> GenerateOptions:
        chat = GenerateOptions(
            messages=[message.for_template() for message in self.messages],
            tools=self.tools if self.tool_choice == "auto" else None,
            max_tokens=self.max_completion_tokens or self.max_tokens or _UNLIMITED,
        )
        return chat | self.response_format.guide() | self.sampling() | _log_probs(self.logprobs, self.top_logprobs)


def _log_probs(is_wanted: bool, num_top: int | None) -> GenerateOptions:
    return GenerateOptions(return_log_probs=True, num_top_log_probs=num_top or None) if is_wanted else GenerateOptions()


def _single_prompt(prompt: Any) -> Any:
    """The prompt of a list of one prompt."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return prompt
    if len(prompt) > 1:
        raise unsupported(f"{len(prompt)} prompts in one request are not supported, only one")
    return prompt[0]


class CompletionRequest(_Sampling):
    """POST /v1/completions, one prompt a request: text or token ids."""

    prompt: Annotated[str | TokenIds, BeforeValidator(_single_prompt)]
    best_of: int | None = None
    echo: Annotated[bool, _only(False)] = False
    logprobs: int | None = Field(None, ge=0, le=_MAX_COMPLETION_LOGPROBS)
    suffix: Annotated[str, _only("")] = ""

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n):
            raise unsupported(f"best_of {self.best_of} is not supported with n {self.n}, only the same number")
        return self

    @property
    def text(self) -> str | None:
        return self.prompt if isinstance(self.prompt, str) else None

    @property
    def includes_logprobs(self) -> bool:
        return self.logprobs is not None

    def options(self) -> GenerateOptions:
        prompt = GenerateOptions(input_ids=None if isinstance(self.prompt, str) else self.prompt)
        length = GenerateOptions(max_tokens=self.max_tokens or _COMPLETION_MAX_TOKENS)
        return prompt | length | self.sampling() | _log_probs(self.includes_logprobs, self.logprobs)
