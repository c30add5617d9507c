"""The door `tensorrt_llm` as NVIDIA's recipe of the LLM API has it: the names, shapes and types of its tensors.

They have no batch dimension. The options of an answer are `sampling_param_*`. An adapter is named by its id, a label
and the directory of its files, all three. Each response of a stream repeats the whole text so far. A request that is
stopped, and the request that stops it, get the error CANCELLED. Source: `triton_backend/all_models/llmapi` of
TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import Cancelled, InvalidRequest, Unsupported
from multilora_engine.request import PerfMetrics
from multilora_engine.serving.front import EngineLink
from multilora_engine.serving.generation_front import GenerationFront
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.outputs import ReplyRow, RowAnswer
from multilora_engine.serving.replies import Reply, Responder, StreamReply
from multilora_engine.serving.request_parser import GenerateCall
from multilora_engine.serving.triton_api import TritonRequest, parameters_of
from multilora_engine.serving.unsupported import (
    HARMLESS_PARAMETERS,
    DoorNames,
    refuse_unsupported,
)
from multilora_engine.text.tokenizer import Tokenizer

_OPTIONS: Mapping[str, str] = {
    "streaming": "streaming",
    "sampling_param_max_tokens": "max_tokens",
    "sampling_param_temperature": "temperature",
    "sampling_param_top_k": "runtime_top_k",
    "sampling_param_top_p": "runtime_top_p",
    "sampling_param_seed": "seed",
    "sampling_param_frequency_penalty": "frequency_penalty",
    "sampling_param_presence_penalty": "presence_penalty",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
    "sampling_param_return_perf_metrics": "return_perf_metrics",
    "return_cumulative_logprob": "return_log_probs",
}
"""Inputs of one value, and the names that `generation` has for them."""

_ADAPTER = ("lora_id", "lora_name", "lora_path")
_CHECKPOINT_SOURCES = ("hf", "nemo")
_MAX_PATH_BYTES = 4096
"""The longest path that Linux opens."""

_DEFAULT_MAX_TOKENS = 32
"""Of the LLM API's sampling parameters."""

_NAMES = DoorNames(
    adapter="lora_id, lora_name and lora_path",
    others={
        "max_tokens": "sampling_param_max_tokens",
        "request_output_len": "sampling_param_max_tokens",
        "stop_words": "sampling_param_stop",
        "stream": "streaming",
        "exclude_input_in_output": "sampling_param_exclude_input_from_output",
        **{theirs: name for name, theirs in _OPTIONS.items() if name.startswith("sampling_param_")},
        "top_k": "sampling_param_top_k",
        "top_p": "sampling_param_top_p",
    },
    harmless=HARMLESS_PARAMETERS.keys() - {"stream"},
)

_CANCELLED = "Request cancelled by client"
"""Clients look for these words where the protocol gives them no code."""


class LlmapiFront(GenerationFront):
    """The front of this door. The one request that it makes of a client's is that of `generation`."""

    def __init__(self, link: EngineLink, can_stream: bool) -> None:
        super().__init__(link, can_stream, make_responder=LlmapiResponder)

    def _read_inputs(
        self, request: TritonRequest, responder: Responder, info: EngineInfo, tokenizer: Tokenizer
    ) -> InputTensors:
        assert isinstance(responder, LlmapiResponder)
        inputs = InputTensors(request)
        if _scalar(inputs, "stop"):
            if not responder.request_id:
                raise InvalidRequest("A request id must be provided for request cancellation")
            return InputTensors.of({"stop": np.array([[True]])})
        parameters = parameters_of(request, info.limits.max_metadata_bytes)
        digests = parameters.pop("lora_expected_digest", [])
        self._refuse_lost_inputs(parameters, info, _NAMES)
        refuse_unsupported(inputs)
        if _scalar(inputs, "streaming") and not self._can_stream:
            raise InvalidRequest(
                "Streaming is only supported in decoupled mode. The server was started with --upstream-models llmapi; "
                "llmapi-decoupled streams"
            )
        responder.told = {name for flag, name in _TOLD.items() if _scalar(inputs, flag)}
        return InputTensors.of({**read_llmapi(inputs), **_expected_digest(digests)})

    def _reply(
        self, call: GenerateCall, rows: Mapping[str, ReplyRow], responder: Responder, tokenizer: Tokenizer
    ) -> Reply:
        if call.is_streaming:
            return StreamReply(responder, rows, call.pad_id, repeats_text=True)
        return super()._reply(call, rows, responder, tokenizer)


def read_llmapi(inputs: InputTensors) -> dict[str, NDArray[Any]]:
    """The tensors of `generation` that ask for the same as a request of this protocol. Raises InvalidRequest,
    Unsupported.
    """
    arrays = {ours: _row(inputs, name) for name, ours in _OPTIONS.items() if name in inputs}
    if "text_input" not in inputs or (num_texts := inputs.array("text_input").size) != 1:
        found = f"{num_texts} texts" if "text_input" in inputs else "none"
        raise InvalidRequest(f"text_input has {found}; a request of this model has one prompt")
    arrays["text_input"] = _row(inputs, "text_input")
    arrays.setdefault("max_tokens", np.array([[_DEFAULT_MAX_TOKENS]], np.int32))
    if "sampling_param_stop" in inputs:
        arrays["stop_words"] = inputs.array("sampling_param_stop").reshape(1, -1)
    if (best_of := _scalar(inputs, "sampling_param_best_of")) not in (None, 1):
        raise Unsupported(f"sampling_param_best_of {best_of}: this server chooses no best of several answers; send 1")
    arrays["runtime_top_k"] = np.array([[_top_k(inputs)]], np.int32)
    return {**arrays, **_read_adapter(inputs)}


def _top_k(inputs: InputTensors) -> int:
    """The top_k of `generation`, 1 where the LLM API decodes greedily: an answer is drawn if a temperature, top_k or
    top_p is given, and none of the two leaves one token alone.
    """
    temperature, top_k, top_p = (
        _scalar(inputs, f"sampling_param_{name}") for name in ("temperature", "top_k", "top_p")
    )
    if top_p is not None and top_p < 0:
        raise InvalidRequest(f"sampling_param_top_p is {top_p}, expected a number in [0, 1]")
    is_unset = temperature is None and top_k is None and top_p is None
    if is_unset or temperature == 0 or top_p == 0:
        return 1
    return top_k or 0


def _read_adapter(inputs: InputTensors) -> dict[str, NDArray[Any]]:
    given = inputs.present(*_ADAPTER, "lora_ckpt_source")
    if not given:
        return {}
    if not set(_ADAPTER) <= set(given):
        raise InvalidRequest(
            f"lora_id, lora_name, and lora_path must all be provided together; the request has {' and '.join(given)}"
        )
    source = _text(inputs, "lora_ckpt_source") if "lora_ckpt_source" in given else "hf"
    if source not in _CHECKPOINT_SOURCES:
        raise InvalidRequest(f"lora_ckpt_source must be one of {_CHECKPOINT_SOURCES}, got {source!r}")
    if source != "hf":
        raise Unsupported(f"lora_ckpt_source {source}: this server reads the folders that PEFT saves; send hf")
    _text(inputs, "lora_name")  # a label, by which nothing is looked up
    path = _text(inputs, "lora_path")
    if not 0 < len(path.encode()) <= _MAX_PATH_BYTES:
        raise InvalidRequest(f"lora_path has {len(path.encode())} bytes, expected 1 .. {_MAX_PATH_BYTES}")
    return {"lora_task_id": _row(inputs, "lora_id"), "lora_path": _row(inputs, "lora_path")}


def _expected_digest(values: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The digest that the adapter must have, a parameter of the request: the protocol has no input for it."""
    if len(values) > 1:
        raise InvalidRequest(f"lora_expected_digest has {len(values)} values; send it once")
    return {"lora_expected_digest": np.array([[value.encode()] for value in values], np.object_)} if values else {}


def _row(inputs: InputTensors, name: str) -> NDArray[Any]:
    """A tensor of one value that is present, in the shape that `generation` has: [1, 1]. Raises InvalidRequest."""
    values = inputs.array(name)
    if values.size != 1:
        raise InvalidRequest(f"Expected a scalar tensor for tensor {name}: it has {values.size} values")
    return values.reshape(1, 1)


def _scalar(inputs: InputTensors, name: str) -> Any:
    """The value of a tensor of one value, None if it is absent."""
    return InputTensors.of({name: _row(inputs, name)}).scalar(name, 0) if name in inputs else None


def _text(inputs: InputTensors, name: str) -> str:
    return InputTensors.of({name: _row(inputs, name)}).text(name, 0) or ""


class LlmapiResponder(Responder):
    """Responses of one answer, whose tensors are [1]. All but the text are strings that a request has to ask for.

    told: the outputs that it asks for.
    """

    def __init__(self, request: TritonRequest) -> None:
        super().__init__(request)
        self.told: set[str] = set()

    def respond(self, answers: Sequence[RowAnswer], pad_id: int, is_final: bool, num_sequences: int = 1) -> None:
        (answer,) = answers
        if answer.finish_reason == "cancelled":
            self.respond_empty()
            return
        values = {name: value(answer) for name, value in _OUTPUTS.items() if name in self.told}
        if answer.perf is not None:
            values |= {name: str(value(answer.perf)) for name, value in _PERF_OUTPUTS.items()}
        texts = {"text_output": answer.text, **values}
        self._append_arrays({name: np.array([text.encode()], np.object_) for name, text in texts.items()}, is_final)

    def respond_empty(self) -> None:
        """The end of a request that was stopped, and of the request that stopped it."""
        self.fail(Cancelled(_CANCELLED))


_OUTPUTS: Mapping[str, Callable[[RowAnswer], str]] = {
    "finish_reason": lambda answer: answer.finish_reason or str(None),
    "stop_reason": lambda answer: answer.stop_word or str(None),
    "cumulative_logprob": lambda answer: str(answer.cum_log_prob),
}

_TOLD: Mapping[str, str] = {f"return_{name}": name for name in _OUTPUTS}
"""For each input that asks for an output, the output."""

_PERF_OUTPUTS: Mapping[str, Callable[[PerfMetrics], float]] = {
    "kv_cache_reused_block": lambda perf: perf.kv_cache_reused_blocks,
    "kv_cache_missed_block": lambda perf: perf.kv_cache_alloc_new_blocks,
    "kv_cache_alloc_new_blocks": lambda perf: perf.kv_cache_alloc_new_blocks,
    "kv_cache_alloc_total_blocks": lambda perf: perf.kv_cache_alloc_total_blocks,
    "kv_cache_hit_rate": lambda perf: perf.kv_cache_reused_blocks / max(1, perf.kv_cache_alloc_total_blocks),
    "arrival_time_ns": lambda perf: perf.arrival_time_ns,
    "first_scheduled_time_ns": lambda perf: perf.first_scheduled_time_ns,
    "first_token_time_ns": lambda perf: perf.first_token_time_ns,
    "last_token_time_ns": lambda perf: perf.last_token_time_ns,
    "acceptance_rate": lambda perf: 0.0,
    "total_accepted_draft_tokens": lambda perf: 0,
    "total_draft_tokens": lambda perf: 0,
}
"""A block that was missed came without keys and values, as every new one."""
