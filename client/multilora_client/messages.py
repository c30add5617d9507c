"""What crosses the wire: a request as named tensors, an answer as named lists of values. No I/O, no state."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from multilora_client.errors import InvalidRequest
from multilora_client.tensors import Tensor, numeric_tensor, string_tensor

DEFAULT_MAX_TOKENS = 128

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True)
class Door:
    """The models that answer, and what they call inputs that the models behind every door share.

    `stop_model` and `upload_model` are asked directly in any case: an ensemble passes neither on.
    """

    stream_model: str
    unary_model: str
    stop_model: str = "generation"
    upload_model: str = "generation_unary"
    input_names: Mapping[str, str] = field(default_factory=dict)


DIRECT = Door("generation", "generation_unary")
"""The engine's own models: cancellation reaches them, and errors keep their place in a stream."""

ENSEMBLE = Door(
    "ensemble",
    "ensemble_unary",
    input_names={
        "runtime_top_k": "top_k",
        "runtime_top_p": "top_p",
        "streaming": "stream",
        "len_penalty": "length_penalty",
    },
)
"""preprocessing -> generation -> postprocessing, the door that TensorRT-LLM clients know. It takes no `input_ids`."""


def is_traceparent(text: str) -> bool:
    """Whether it is the header of that name, version 00 of W3C's trace context."""
    return _TRACEPARENT.fullmatch(text) is not None


class Message(TypedDict):
    """One turn of a chat: `role` is system, user or assistant."""

    role: str
    content: str


class ChatOptions(TypedDict, total=False):
    """A chat in place of a prompt; None is as good as not given.

    messages: turns of a chat, to which the server applies the model's chat template; each is a Message or whatever
        else the template understands.
    tools: beside `messages`, what the model may call, for the template; templates without a place for them refuse.
    chat_template_kwargs: further values by the names that the template knows, such as `enable_thinking`.
    add_generation_prompt: whether the template opens the assistant's turn. True when not given.
    continue_final_message: whether the answer goes on with the last of `messages` instead of a new turn.
    """

    messages: Sequence[Mapping[str, object]] | None
    tools: Sequence[Mapping[str, object]] | None
    chat_template_kwargs: Mapping[str, object] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class GenerateOptions(ChatOptions, total=False):
    """Everything `generate` and `stream` take beside the prompt and the adapter; None is as good as not given.

    Exactly one of the prompt, `messages` and `input_ids` is required.

    input_ids: token ids of the prompt.
    truncate_prompt_tokens: keep only so many tokens of the prompt, its last ones; -1 for as many as leave room for
        `max_tokens`.
    max_tokens: most tokens to generate, 128 when not given; 0 only computes the prompt. min_tokens: least before an end
        token counts.
    temperature, top_k, top_p, min_p: sampling. The server is greedy unless one of them is given; `top_k` 0 means no
        limit.
    repetition_penalty (1 is none), presence_penalty, frequency_penalty (0 is none): against saying things again.
    logit_bias: what is added to the logits of tokens, by their ids.
    seed: makes sampling repeatable.
    num_return_sequences: so many answers in a Generation's `alternatives`; the chunks of a stream say by their
        `sequence_index` which of them they are part of.
    beam_width: more than 1 is beam search, for the likeliest answers, whose log-probs are divided by length
        ** length_penalty; not for streams. early_stopping, beam_search_diversity_rate: see the server's documentation;
        not at the ensembles.
    return_log_probs, num_top_log_probs: tell how likely the tokens were, and so many of the likeliest ones.
    return_prompt_log_probs, num_prompt_top_log_probs: the same of the prompt's tokens, in an answer's `prompt`; the
        second one implies the first.
    return_context_logits, return_generation_logits: the model's own logits.
    stop_words: texts that end the answer. stop_token_ids: tokens that do. Neither's text is part of the answer, unless
        include_stop_str_in_output is true. bad_words: texts that are never completed.
    guide_type, guide: what the answer has to parse as: `json` (without a guide), or `json_schema`, `regex` or
        `ebnf_grammar` and the text of it.
    lora_name: the adapter by the name under which the server has it, instead of by its id.
    end_id: the token that ends the answer instead of the model's own; -1 for none.
    priority: requests with a smaller number are served first; 0 when not given.
    timeout_s: seconds after which the server ends the request; the client waits a second longer, then raises TimedOut.
        Triton passes no timeout on to HTTP streams: there the client ends the request, and raises TimedOut at once.
    request_id: a name to `stop` the request by; drawn when not given.
    traceparent: of the W3C trace that the server's spans shall continue, if it makes any: 00-TRACE-SPAN-FLAGS.
    """

    input_ids: Sequence[int] | None
    truncate_prompt_tokens: int | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    num_return_sequences: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | None
    beam_search_diversity_rate: float | None
    return_log_probs: bool | None
    num_top_log_probs: int | None
    return_prompt_log_probs: bool | None
    num_prompt_top_log_probs: int | None
    return_context_logits: bool | None
    return_generation_logits: bool | None
    stop_words: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    bad_words: Sequence[str] | None
    guide_type: str | None
    guide: str | None
    lora_name: str | None
    end_id: int | None
    priority: int | None
    timeout_s: float | None
    request_id: str | None
    traceparent: str | None


@dataclass(frozen=True)
class InferRequest:
    """One request to one model. `timeout_s` None waits for ever; `traceparent` is a header, empty for none, as is
    `api_key`.
    """

    model: str
    request_id: str
    inputs: Mapping[str, Tensor]
    timeout_s: float | None = None
    traceparent: str = ""
    api_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.traceparent and not is_traceparent(self.traceparent):
            raise InvalidRequest(f"traceparent is {self.traceparent!r}, expected 00-TRACE-SPAN-FLAGS in hexadecimal")

    @property
    def headers(self) -> dict[str, str]:
        """What goes beside the tensors."""
        return ({"traceparent": self.traceparent} if self.traceparent else {}) | self.authorization

    @property
    def authorization(self) -> dict[str, str]:
        """The header that has the API key, in lower case."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True)
class Response:
    """One response: values of each output in row-major order, and whether the server said that it is the last one.

    A transport without such a flag (HTTP) leaves `is_final` False.
    """

    outputs: Mapping[str, Sequence[Any]]
    is_final: bool = False

    def first(self, name: str) -> Any:
        """The first value of an output, None when it is absent or empty."""
        return next(iter(self.outputs.get(name, ())), None)

    def split(self, name: str, count: int) -> list[Sequence[Any]]:
        """The values of an output in `count` equal parts, one for each answer; empty ones when it is absent."""
        values = self.outputs.get(name, ())
        size = len(values) // count
        return [values[i * size : (i + 1) * size] for i in range(count)]


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of a prompt, special ones included, and how likely each was behind those before it.

    tokens: the bytes of each token, special ones spelled by their names, and then those of its likeliest ones.
    log_probs: of each token; the first one has nothing before it and 0.0.
    top_log_probs: in the place of each token the likeliest ones, best first, as (token id, log-prob); none in the place
        of the first.
    """

    token_ids: list[int]
    tokens: list[list[bytes]]
    log_probs: list[float]
    top_log_probs: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Alternative:
    """One of the answers that a request asked for at once.

    log_probs: of each token, when asked for. top_log_probs: of each token the likeliest ones in its place, best first,
        as (token id, log-prob). tokens: the UTF-8 bytes of each token, maybe part of a character, and then those of
        its likeliest ones. cum_log_prob: the sum over the tokens, None when not asked for.
    generation_logits: float32 [tokens, vocab] or None, what each token was chosen by. num_output_tokens: also from
        models that return text only.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    cum_log_prob: float | None = None
    generation_logits: NDArray[np.float32] | None = field(default=None, compare=False)
    num_output_tokens: int | None = None
    tokens: list[list[bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """What a whole answer and a piece of one have in common.

    text: the completion without the prompt. token_ids: its tokens, empty from models that return text only.
    finish_reason: `stop` (end token or stop word), `length` (max_tokens or the context used up) or `cancelled`; None
        before the end, and from models that do not say.
    num_input_tokens, num_output_tokens: totals so far, None from models that do not say. num_cached_tokens: how many of
        the prompt's tokens the server did not compute, since its prefix cache had them.
    lora_task_id, lora_digest: the adapter that answered, as the server reports it; None and "" for the base model.
    log_probs .. generation_logits: as in Alternative. context_logits: float32 [tokens, vocab], behind each token of the
        prompt. prompt: its tokens and their log-probs. Both are None when not asked for, and in all chunks of a
        sequence but the first.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    num_input_tokens: int | None
    num_output_tokens: int | None
    lora_task_id: int | None
    lora_digest: str
    request_id: str
    log_probs: list[float] = field(default_factory=list, kw_only=True)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list, kw_only=True)
    tokens: list[list[bytes]] = field(default_factory=list, kw_only=True)
    cum_log_prob: float | None = field(default=None, kw_only=True)
    generation_logits: NDArray[np.float32] | None = field(default=None, compare=False, kw_only=True)
    context_logits: NDArray[np.float32] | None = field(default=None, compare=False, kw_only=True)
    prompt: PromptTokens | None = field(default=None, kw_only=True)
    num_cached_tokens: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Generation(Answer):
    """A whole answer. alternatives: all answers, the first of which this one is; the beams of a search best first."""

    alternatives: list[Alternative] = field(default_factory=list, kw_only=True)


@dataclass(frozen=True)
class Chunk(Answer):
    """A piece of an answer; the texts of all chunks with its `sequence_index` together are the whole one.

    is_final: whether it is the last chunk of the stream, in which every answer has ended.
    """

    is_final: bool
    sequence_index: int = 0


def generation_inputs(
    prompt: str | None, streaming: bool, door: Door, **options: Unpack[GenerateOptions]
) -> dict[str, Tensor]:
    """The input tensors of a generation.

    Raises InvalidRequest unless there is exactly one prompt, and for a stream of beams.
    """
    check_names(options, GenerateOptions)
    if streaming and (options.get("beam_width") or 1) > 1:
        raise InvalidRequest("beam_width is not for streams")
    inputs = _prompt_inputs(prompt, options) | _sampling_inputs(options)
    inputs["streaming"] = numeric_tensor(streaming, np.bool_)
    for flag in ("exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens"):
        inputs[flag] = numeric_tensor(True, np.bool_)
    return {door.input_names.get(name, name): tensor for name, tensor in inputs.items()}


def task_id_input(lora_task_id: int) -> dict[str, Tensor]:
    """The input that selects an adapter. Raises InvalidRequest unless it is an unsigned 64-bit number."""
    return {"lora_task_id": checked_tensor("lora_task_id", lora_task_id, np.uint64)}


def stop_inputs() -> dict[str, Tensor]:
    """The inputs of a request that ends the one with the same request id."""
    return {"stop": numeric_tensor(True, np.bool_)}


def check_names(options: ChatOptions, kind: type[ChatOptions]) -> None:
    """Raises TypeError as Python does. A misspelt option that was passed over would get the base model's answer."""
    if unknown := sorted(options.keys() - kind.__annotations__.keys()):
        hint = "; an adapter is given by adapter=ID or lora_name=" if any("lora" in name for name in unknown) else ""
        raise TypeError(f"there is no option {', '.join(unknown)}{hint}")


def _prompt_inputs(prompt: str | None, options: GenerateOptions) -> dict[str, Tensor]:
    messages, input_ids = options.get("messages"), options.get("input_ids")
    if sum(given is not None for given in (prompt, messages, input_ids)) != 1:
        raise InvalidRequest("exactly one of prompt, messages and input_ids is required")
    if prompt is not None or messages is not None:
        return text_or_chat_input("text_input", "messages", prompt, options)
    _check_chat_options(options)
    return {
        "input_ids": checked_tensor("input_ids", input_ids, np.int32),
        "input_lengths": numeric_tensor(len(input_ids or ()), np.int32),
    }


def text_or_chat_input(
    text_name: str, messages_name: str, prompt: str | None, options: ChatOptions
) -> dict[str, Tensor]:
    """The input of a prompt, or of a chat. Raises InvalidRequest unless there is exactly one of them."""
    messages = options.get("messages")
    if (prompt is None) == (messages is None):
        raise InvalidRequest("exactly one of prompt and messages is required")
    if messages is not None:
        return {messages_name: _strings("messages", [_chat_json(messages, options)])}
    _check_chat_options(options)
    return {text_name: _strings("prompt", [prompt or ""])}


def _chat_json(messages: Sequence[Mapping[str, object]], options: ChatOptions) -> str:
    given = {name: value for name in _BESIDE_MESSAGES if (value := options.get(name)) or value is False}
    chat = {"messages": list(messages), **given} if given else list(messages)
    return json.dumps(chat, ensure_ascii=False)


_BESIDE_MESSAGES = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


def _check_chat_options(options: ChatOptions) -> None:
    """Raises InvalidRequest for an option of a chat where there is none."""
    if given := [name for name in _BESIDE_MESSAGES if options.get(name)]:
        raise InvalidRequest(f"{' and '.join(given)} go with messages only")


_SAMPLING_INPUTS: Mapping[str, tuple[str, type[np.generic]]] = {
    "max_tokens": ("max_tokens", np.int32),
    "min_tokens": ("min_tokens", np.int32),
    "temperature": ("temperature", np.float32),
    "top_k": ("runtime_top_k", np.int32),
    "top_p": ("runtime_top_p", np.float32),
    "min_p": ("min_p", np.float32),
    "repetition_penalty": ("repetition_penalty", np.float32),
    "presence_penalty": ("presence_penalty", np.float32),
    "frequency_penalty": ("frequency_penalty", np.float32),
    "seed": ("seed", np.uint64),
    "end_id": ("end_id", np.int32),
    "num_return_sequences": ("num_return_sequences", np.int32),
    "beam_width": ("beam_width", np.int32),
    "length_penalty": ("len_penalty", np.float32),
    "early_stopping": ("early_stopping", np.bool_),
    "beam_search_diversity_rate": ("beam_search_diversity_rate", np.float32),
    "return_log_probs": ("return_log_probs", np.bool_),
    "num_top_log_probs": ("num_top_log_probs", np.int32),
    "return_prompt_log_probs": ("return_prompt_log_probs", np.bool_),
    "num_prompt_top_log_probs": ("num_prompt_top_log_probs", np.int32),
    "truncate_prompt_tokens": ("truncate_prompt_tokens", np.int32),
    "include_stop_str_in_output": ("include_stop_str_in_output", np.bool_),
    "priority": ("priority", np.int32),
    "return_context_logits": ("return_context_logits", np.bool_),
    "return_generation_logits": ("return_generation_logits", np.bool_),
}


def _sampling_inputs(options: GenerateOptions) -> dict[str, Tensor]:
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if "temperature" in given and not given.keys() & {"top_k", "top_p"}:
        # To the server a temperature of 1 by itself asks for nothing, since others' clients always send it.
        given["top_k"] = 0
    inputs = {
        input_name: checked_tensor(option, given[option], dtype)
        for option, (input_name, dtype) in _SAMPLING_INPUTS.items()
        if option in given
    }
    for option in ("stop_words", "bad_words"):
        if given.get(option):
            inputs[option] = _strings(option, given[option])
    if given.get("stop_token_ids"):
        inputs["stop_words_list"] = _single_tokens("stop_token_ids", given["stop_token_ids"])
    if given.get("logit_bias"):
        inputs["embedding_bias_ids"] = checked_tensor("logit_bias", list(given["logit_bias"]), np.int32)
        inputs["embedding_bias_weights"] = checked_tensor("logit_bias", list(given["logit_bias"].values()), np.float32)
    for option in ("guide_type", "guide"):
        if option in given:
            inputs[f"guided_decoding_{option}"] = _strings(option, [given[option]])
    if "lora_name" in given:
        inputs["lora_name"] = _strings("lora_name", [given["lora_name"]])
    return inputs


def _single_tokens(option: str, token_ids: Sequence[int]) -> Tensor:
    """Sequences of one token each, as upstream writes them: all tokens, and where each sequence ends."""
    ends = range(1, len(token_ids) + 1)
    return checked_tensor(option, [list(token_ids), list(ends)], np.int32, shape=(1, 2, -1))


def checked_tensor(option: str, value: Any, dtype: type[np.generic], shape: tuple[int, ...] = (1, -1)) -> Tensor:
    """`numeric_tensor` of an option. Raises InvalidRequest, naming it."""
    try:
        return numeric_tensor(value, dtype, shape)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequest(f"{option}: {error}") from error


def _strings(option: str, values: Sequence[str]) -> Tensor:
    try:
        return string_tensor(values)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{option} is not Unicode text: {error}") from error
