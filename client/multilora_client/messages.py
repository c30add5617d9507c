"""What crosses the wire: a request as named tensors, an answer as named lists of values. No I/O, no state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import numpy as np

from multilora_client.errors import InvalidRequest
from multilora_client.tensors import Tensor, numeric_tensor, string_tensor

DEFAULT_MAX_TOKENS = 128


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
    input_names={"runtime_top_k": "top_k", "runtime_top_p": "top_p", "streaming": "stream"},
)
"""preprocessing -> generation -> postprocessing, the door that TensorRT-LLM clients know. It takes no `input_ids`."""


class Message(TypedDict):
    """One turn of a chat: `role` is system, user or assistant."""

    role: str
    content: str


class GenerateOptions(TypedDict, total=False):
    """Everything `generate` and `stream` take beside the prompt and the adapter; None is as good as not given.

    Exactly one of the prompt, `messages` and `input_ids` is required.

    messages: turns of a chat, to which the server applies the model's chat template; each is a Message or whatever
        else the template understands.
    tools: beside `messages`, what the model may call, for the template; templates without a place for them refuse.
    input_ids: token ids of the prompt.
    max_tokens: most tokens to generate, 128 when not given. min_tokens: least before an end token counts.
    temperature, top_k, top_p: sampling. The server is greedy unless one of them is given; `top_k` 0 means no limit.
    seed: makes sampling repeatable.
    stop_words: texts that end the answer and are not part of it.
    guide_type, guide: what the answer has to parse as: `json` (without a guide), or `json_schema`, `regex` or
        `ebnf_grammar` and the text of it.
    lora_name: the adapter by the name under which the server has it, instead of by its id.
    end_id: the token that ends the answer instead of the model's own; -1 for none.
    timeout_s: seconds after which the server ends the request; the client waits a second longer, then raises TimedOut.
        Triton passes no timeout on to HTTP streams: there the client ends the request, and raises TimedOut at once.
    request_id: a name to `stop` the request by; drawn when not given.
    """

    messages: Sequence[Mapping[str, object]] | None
    tools: Sequence[Mapping[str, object]] | None
    input_ids: Sequence[int] | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop_words: Sequence[str] | None
    guide_type: str | None
    guide: str | None
    lora_name: str | None
    end_id: int | None
    timeout_s: float | None
    request_id: str | None


@dataclass(frozen=True)
class InferRequest:
    """One request to one model. `timeout_s` None waits for ever."""

    model: str
    request_id: str
    inputs: Mapping[str, Tensor]
    timeout_s: float | None = None


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

    @property
    def text(self) -> str:
        return "".join(self.outputs.get("text_output", ()))

    @property
    def token_ids(self) -> list[int]:
        return list(self.outputs.get("output_ids", ()))[: self.first("sequence_length")]


@dataclass(frozen=True)
class Answer:
    """What a whole answer and a piece of one have in common.

    text: the completion without the prompt. token_ids: its tokens, empty from models that return text only.
    finish_reason: `stop` (end token or stop word), `length` (max_tokens or the context used up) or `cancelled`; None
        before the end, and from models that do not say.
    num_input_tokens, num_output_tokens: totals so far, None from models that do not say.
    lora_task_id, lora_digest: the adapter that answered, as the server reports it; None and "" for the base model.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    num_input_tokens: int | None
    num_output_tokens: int | None
    lora_task_id: int | None
    lora_digest: str
    request_id: str


@dataclass(frozen=True)
class Generation(Answer):
    """A whole answer."""


@dataclass(frozen=True)
class Chunk(Answer):
    """A piece of an answer; the texts of all chunks together are the whole one."""

    is_final: bool


def generation_inputs(
    prompt: str | None, streaming: bool, door: Door, **options: Unpack[GenerateOptions]
) -> dict[str, Tensor]:
    """The input tensors of a generation. Raises InvalidRequest unless there is exactly one prompt."""
    inputs = _prompt_inputs(prompt, options) | _sampling_inputs(options)
    inputs["streaming"] = numeric_tensor(streaming, np.bool_)
    for flag in ("exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens"):
        inputs[flag] = numeric_tensor(True, np.bool_)
    return {door.input_names.get(name, name): tensor for name, tensor in inputs.items()}


def task_id_input(lora_task_id: int) -> dict[str, Tensor]:
    """The input that selects an adapter. Raises InvalidRequest unless it is an unsigned 64-bit number."""
    return {"lora_task_id": _number("lora_task_id", lora_task_id, np.uint64)}


def stop_inputs() -> dict[str, Tensor]:
    """The inputs of a request that ends the one with the same request id."""
    return {"stop": numeric_tensor(True, np.bool_)}


def parse_generation(response: Response, request_id: str) -> Generation:
    return Generation(**_answer_fields(response), request_id=request_id)


def parse_chunk(response: Response, request_id: str) -> Chunk:
    fields = _answer_fields(response)
    is_final = response.is_final or fields["finish_reason"] is not None
    return Chunk(**fields, request_id=request_id, is_final=is_final)


def _prompt_inputs(prompt: str | None, options: GenerateOptions) -> dict[str, Tensor]:
    messages, input_ids = options.get("messages"), options.get("input_ids")
    if sum(given is not None for given in (prompt, messages, input_ids)) != 1:
        raise InvalidRequest("exactly one of prompt, messages and input_ids is required")
    if options.get("tools") and messages is None:
        raise InvalidRequest("tools go with messages only")
    if prompt is not None:
        return {"text_input": _strings("prompt", [prompt])}
    if messages is not None:
        return {"messages": _strings("messages", [_chat_json(messages, options.get("tools"))])}
    return {
        "input_ids": _number("input_ids", input_ids, np.int32),
        "input_lengths": numeric_tensor(len(input_ids or ()), np.int32),
    }


def _chat_json(messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None) -> str:
    chat = {"messages": list(messages), "tools": list(tools)} if tools else list(messages)
    return json.dumps(chat, ensure_ascii=False)


_SAMPLING_INPUTS: Mapping[str, tuple[str, type[np.generic]]] = {
    "max_tokens": ("max_tokens", np.int32),
    "min_tokens": ("min_tokens", np.int32),
    "temperature": ("temperature", np.float32),
    "top_k": ("runtime_top_k", np.int32),
    "top_p": ("runtime_top_p", np.float32),
    "seed": ("seed", np.uint64),
    "end_id": ("end_id", np.int32),
}


def _sampling_inputs(options: GenerateOptions) -> dict[str, Tensor]:
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if "temperature" in given and not given.keys() & {"top_k", "top_p"}:
        # To the server a temperature of 1 by itself asks for nothing, since others' clients always send it.
        given["top_k"] = 0
    inputs = {
        input_name: _number(option, given[option], dtype)
        for option, (input_name, dtype) in _SAMPLING_INPUTS.items()
        if option in given
    }
    if given.get("stop_words"):
        inputs["stop_words"] = _strings("stop_words", given["stop_words"])
    for option in ("guide_type", "guide"):
        if option in given:
            inputs[f"guided_decoding_{option}"] = _strings(option, [given[option]])
    if "lora_name" in given:
        inputs["lora_name"] = _strings("lora_name", [given["lora_name"]])
    return inputs


def _number(option: str, value: Any, dtype: type[np.generic]) -> Tensor:
    try:
        return numeric_tensor(value, dtype)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequest(f"{option}: {error}") from error


def _strings(option: str, values: Sequence[str]) -> Tensor:
    try:
        return string_tensor(values)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{option} is not Unicode text: {error}") from error


def _answer_fields(response: Response) -> dict[str, Any]:
    """A task id of 0 without a digest is how the base model signs."""
    lora_task_id, lora_digest = response.first("lora_task_id_out"), response.first("lora_digest") or ""
    return {
        "text": response.text,
        "token_ids": response.token_ids,
        "finish_reason": response.first("finish_reason") or None,
        "num_input_tokens": response.first("num_input_tokens"),
        "num_output_tokens": response.first("num_output_tokens"),
        "lora_task_id": lora_task_id if lora_task_id or lora_digest else None,
        "lora_digest": lora_digest,
    }
