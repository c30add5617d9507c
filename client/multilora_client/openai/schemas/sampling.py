"""The fields that requests share: how the tokens of an answer are chosen, and the values that are told of them."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from multilora_client.openai.errors import invalid, unsupported
from multilora_client.openai.schemas.base import ModelName, Strict, TokenId, only
from multilora_client.openai.schemas.guides import Choices, JsonGuide, ResponseFormat, StructuredOutputs, guide_of
from multilora_client.options import GenerateOptions
from multilora_wire.adapter_names import MAX_SESSION_BYTES

UNLIMITED = 2**31 - 1  # the server ends an answer where the context does
MAX_TOP_LOGPROBS = 20  # OpenAI's limit for chats, vLLM's for both
_NUM_SEEDS = 2**64
_MAX_STOP_WORDS = 16
_MAX_CHOICES = 128  # OpenAI's limit, and the server's
_MAX_BIASED_TOKENS = 1024
_NO_END = -1

StopWord = Annotated[str, Field(min_length=1, max_length=1000)]
StopWords = Annotated[list[StopWord], Field(max_length=_MAX_STOP_WORDS)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


RequestId = Annotated[str, Field(min_length=1, max_length=200)]


class StreamOptions(Strict):
    """continuous_usage_stats: vLLM's, the usage so far in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # concerns OpenAI's network packets; the answer is the same


class TokenChoice(Strict):
    """How the tokens of an answer are chosen, and how it ends. OpenAI's parameters first, then vLLM's, then the digest
    that the adapter must have, and the session that keeps its member of an alias.
    """

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopWord | StopWords = Field(default_factory=list)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=_MAX_BIASED_TOKENS)] = Field(default_factory=dict)

    top_k: int | None = Field(None, ge=-1, le=UNLIMITED)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0, le=UNLIMITED)
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    bad_words: StopWords = Field(default_factory=list)
    priority: Priority | None = None
    lora_expected_digest: Digest | None = None
    lora_session: str | None = None

    def token_choice(self) -> dict[str, Any]:
        """The fields that the request has."""
        return self.model_dump(include=set(TokenChoice.model_fields), exclude_unset=True)


class Sampling(TokenChoice):
    """The further fields of chats and completions: OpenAI's parameters first, then vLLM's and SGLang's, then fields by
    which both ask for what this server does anyway, or does not do: every other value is refused.
    """

    model: ModelName
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0, le=UNLIMITED)
    n: int = Field(1, ge=1, le=_MAX_CHOICES)
    best_of: int | None = None
    response_format: ResponseFormat = ResponseFormat(type="text")
    user: str | None = None

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=UNLIMITED)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    return_tokens_as_token_ids: bool = False
    request_id: RequestId | None = None
    rid: RequestId | None = None  # SGLang's request_id
    lora_path: ModelName | None = None  # SGLang's name of an adapter
    guided_json: JsonGuide | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: JsonGuide | None = None  # this and the next two: SGLang's
    regex: str | None = None
    ebnf: str | None = None
    no_stop_trim: bool = False  # SGLang's include_stop_str_in_output

    skip_special_tokens: Annotated[bool, only(True)] = True
    spaces_between_special_tokens: bool = True  # between tokens that are left out
    detokenize: Annotated[bool, only(True)] = True
    use_beam_search: Annotated[bool, only(False)] = False
    length_penalty: Annotated[float, only(1.0)] = 1.0
    early_stopping: Annotated[bool, only(False)] = False
    guided_decoding_backend: str | None = None  # which library obeys the guide, not the guide
    include_reasoning: bool = True  # vLLM's; the next two are SGLang's
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    mm_processor_kwargs: Annotated[dict[str, Any] | None, only({})] = None
    logits_processors: Annotated[list[Any] | None, only([])] = None
    vllm_xargs: Annotated[dict[str, Any] | None, only({})] = None
    custom_params: Annotated[dict[str, Any] | None, only({})] = None
    custom_labels: dict[str, str] | None = None  # of SGLang's metrics
    return_token_ids: Annotated[bool, only(False)] = False
    return_prompt_token_ids: Annotated[bool, only(False)] = False
    return_hidden_states: Annotated[bool, only(False)] = False
    return_routed_experts: Annotated[bool, only(False)] = False
    return_cached_tokens_details: Annotated[bool, only(False)] = False
    return_meta_info: Annotated[bool, only(False)] = False

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def includes_running_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options goes with stream only", "stream_options")
        return self

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs is not supported with stream", "prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n):
            raise unsupported(
                f"best_of must be n ({self.n}): this server chooses no best of several answers", "best_of"
            )
        return self

    @model_validator(mode="after")
    def _check_request_id(self) -> Self:
        if self.request_id and self.rid and self.request_id != self.rid:
            raise invalid("request_id and rid contradict each other", "request_id")
        return self

    @property
    def answer_id(self) -> str | None:
        """The id that the client chose for the answer."""
        return self.request_id or self.rid

    @property
    def session(self) -> str | None:
        """The session for an alias: the client's own, else OpenAI's fields that name a conversation or a user."""
        return self.lora_session or session_of(self.user)

    def guides(self) -> dict[str, GenerateOptions]:
        """The guides that the request's fields ask for, by the field."""
        return {
            "response_format": self.response_format.guide(),
            "guided_json": guide_of(self.guided_json, None, None, None),
            "guided_regex": guide_of(None, self.guided_regex, None, None),
            "guided_choice": guide_of(None, None, self.guided_choice, None),
            "guided_grammar": guide_of(None, None, None, self.guided_grammar),
            "json_schema": guide_of(self.json_schema, None, None, None),
            "regex": guide_of(None, self.regex, None, None),
            "ebnf": guide_of(None, None, None, self.ebnf),
            "structured_outputs": self.structured_outputs.guide() if self.structured_outputs else GenerateOptions(),
        }

    def sampling(self) -> GenerateOptions:
        """The options that both kinds share. A top_p of 0 leaves only the likeliest token; the server's 0 is unset."""
        is_greedy = self.temperature == 0 or self.top_p == 0
        return GenerateOptions(
            default_options=[] if is_greedy else sorted({"temperature", "top_p"} - self.model_fields_set),
            temperature=0.0 if is_greedy else self.temperature,
            top_p=None if is_greedy else self.top_p,
            top_k=self.top_k if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            min_tokens_holds_stops=True if self.min_tokens else None,
            logit_bias={int(token_id): bias for token_id, bias in self.logit_bias.items()},
            seed=None if self.seed is None else self.seed % _NUM_SEEDS,
            num_return_sequences=self.n if self.n > 1 else None,
            presence_penalty=self.presence_penalty or None,
            frequency_penalty=self.frequency_penalty or None,
            stop_words=[self.stop] if isinstance(self.stop, str) else self.stop,
            bad_words=[spelling for word in self.bad_words for spelling in _spellings(word)],
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output or self.no_stop_trim or None,
            end_id=_NO_END if self.ignore_eos else None,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority,
            lora_expected_digest=self.lora_expected_digest,
            lora_session=self.session,
        )


def session_of(name: str | None) -> str | None:
    """The session of a conversation or a user, which OpenAI's protocol may name at any length."""
    content = (name or "").encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest() if len(content) > MAX_SESSION_BYTES else name


def _spellings(bad_word: str) -> list[str]:
    """A bad word at the beginning of a text and after a space: vLLM bans both, the server's words stand as they are."""
    word = bad_word.lstrip()
    return [word, f" {word}"] if word else [bad_word]


def log_probs(num_top: int | None) -> GenerateOptions:
    """num_top: the number of likeliest tokens beside each of the answer, None for no log-probs at all."""
    return (
        GenerateOptions()
        if num_top is None
        else GenerateOptions(return_log_probs=True, num_top_log_probs=num_top or None)
    )


def prompt_log_probs(*nums_top: int | None) -> GenerateOptions:
    """The options for log-probs of the prompt's tokens; the largest of `nums_top` counts."""
    asked = [num_top for num_top in nums_top if num_top is not None]
    if not asked:
        return GenerateOptions()
    return GenerateOptions(return_prompt_log_probs=True, num_prompt_top_log_probs=max(asked) or None)
