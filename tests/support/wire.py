"""Requests as a client without our package writes them: plain tritonclient, every tensor with its batch dimension."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from multilora_client import Adapter, AdapterTensors

GrpcClient = tritonclient.grpc.InferenceServerClient
HttpClient = tritonclient.http.InferenceServerClient
STREAM_TIMEOUT_S = 300.0

_DTYPES = {
    "text_input": np.object_,
    "messages": np.object_,
    "stop_words": np.object_,
    "guided_decoding_guide_type": np.object_,
    "guided_decoding_guide": np.object_,
    "lora_name": np.object_,
    "lora_session": np.object_,
    "lora_expected_digest": np.object_,
    "lora_task_id": np.uint64,
    "seed": np.uint64,
    "temperature": np.float32,
    "top_p": np.float32,
    "runtime_top_p": np.float32,
    "runtime_top_p_decay": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "frequency_penalty": np.float32,
    "embedding_bias_weights": np.float32,
    "bad_words": np.object_,
    "embedding_bias_words": np.object_,
    "return_log_probs": np.bool_,
    "return_context_logits": np.bool_,
    "return_generation_logits": np.bool_,
    "return_perf_metrics": np.bool_,
    "stream": np.bool_,
    "streaming": np.bool_,
    "stop": np.bool_,
    "exclude_input_in_output": np.bool_,
}


def tensors(**values: Any) -> dict[str, np.ndarray]:
    """name -> array [1, n]: scalars and lists become one row of the tensor's type (INT32 unless it has another)."""
    arrays = {}
    for name, value in values.items():
        row = value if isinstance(value, (list, tuple)) else [value]
        row = [v.encode() if isinstance(v, str) else v for v in row]
        arrays[name] = np.array([row], _DTYPES.get(name, np.int32))
    return arrays


def adapter_tensors(adapter: Adapter) -> dict[str, np.ndarray]:
    """The three tensors of an adapter's first request; `lora_weights_bf16` as float32, as tritonclient wants it."""
    assert isinstance(adapter.content, AdapterTensors)
    weights, dtype = adapter.content.weights, adapter.content.dtype
    name = {"FP16": "lora_weights", "BF16": "lora_weights_bf16", "FP32": "lora_weights_fp32"}[dtype]
    if dtype == "BF16":
        weights = (weights.astype(np.uint32) << 16).view(np.float32)
    return {
        "lora_task_id": np.array([[adapter.lora_task_id]], np.uint64),
        name: weights[None],
        "lora_config": adapter.content.config[None],
    }


def adapter_files(directory: Path, lora_task_id: int) -> dict[str, np.ndarray]:
    """The tensors of an adapter's first request as PEFT's files."""
    return {
        "lora_task_id": np.array([[lora_task_id]], np.uint64),
        "lora_peft_config": np.array([[(directory / "adapter_config.json").read_bytes()]], np.object_),
        "lora_peft_weights": np.fromfile(directory / "adapter_model.safetensors", np.uint8)[None],
    }


def infer_inputs(module: ModuleType, arrays: dict[str, np.ndarray]) -> list[Any]:
    """tritonclient's inputs; `module` is tritonclient.grpc or tritonclient.http."""
    inputs = []
    for name, array in arrays.items():
        dtype = "BF16" if name == "lora_weights_bf16" else np_to_triton_dtype(array.dtype)
        tensor = module.InferInput(name, list(array.shape), dtype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def text_of(result: Any) -> str:
    return str(result.as_numpy("text_output").flatten()[0].decode())


def infer(client: GrpcClient | HttpClient, model: str, arrays: dict[str, np.ndarray], **options: Any) -> Any:
    """One request, one response."""
    module = tritonclient.grpc if isinstance(client, GrpcClient) else tritonclient.http
    return client.infer(model, infer_inputs(module, arrays), **options)


@dataclass
class Stream:
    """An open gRPC stream with one request on it. Iterating gives results up to the final one, or raises."""

    client: GrpcClient
    responses: queue.SimpleQueue[Any]
    is_finished: bool = False

    def __iter__(self) -> Iterator[Any]:
        while True:
            result = self.next()
            response = result.get_response()
            if response.outputs:
                yield result
            if self.is_finished:
                return

    def next(self) -> Any:
        result, error = self.responses.get(timeout=STREAM_TIMEOUT_S)
        self.is_finished = error is not None or is_final(result)
        if error is not None:
            raise error
        return result


def is_final(result: Any) -> bool:
    """Whether a response of a stream is its request's last."""
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


@contextmanager
def stream(url: str, model: str, arrays: dict[str, np.ndarray], **options: Any) -> Iterator[Stream]:
    """Send one request on a stream of its own; leaving closes the stream, and cancels what is unfinished."""
    with GrpcClient(url) as client:
        opened = Stream(client, queue.SimpleQueue())
        client.start_stream(lambda result, error: opened.responses.put((result, error)))
        try:
            client.async_stream_infer(
                model,
                infer_inputs(tritonclient.grpc, arrays),
                enable_empty_final_response=True,
                **options,
            )
            yield opened
        finally:
            client.stop_stream(cancel_requests=not opened.is_finished)


def stream_texts(url: str, model: str, arrays: dict[str, np.ndarray], **options: Any) -> list[str]:
    """The text of each response of a stream."""
    with stream(url, model, arrays, **options) as responses:
        return [text_of(result) for result in responses]


def error_of(error: InferenceServerException) -> tuple[str, str]:
    """(status, message) of an error, as the protocol gives them."""
    return str(error.status()), str(error.message())
