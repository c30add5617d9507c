"""Readiness by a real inference: this server's own ready endpoints stay green when a model's process has died."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from multilora_engine.tritonserver.addresses import Addresses

_TIMEOUT_S = 60.0
_NOT_YET = ("[UNAVAILABLE]", "failed to connect", "Deadline Exceeded")


class NotYet(Exception):
    """The engine is starting, or busy; ask again."""


def probe_generation(addresses: Addresses) -> None:
    """Get one token through `generation_unary` (unary) and one through `ensemble` (streaming gRPC).

    Raises NotYet while the engine starts or has too much to do, InferenceServerException for any other failure.
    """
    with InferenceServerClient(addresses.grpc_url) as client:
        try:
            client.infer("generation_unary", _inputs("request_output_len"), client_timeout=_TIMEOUT_S)
            _infer_stream(client, "ensemble", _inputs("max_tokens"))
        except InferenceServerException as error:
            if any(text in str(error) for text in _NOT_YET):
                raise NotYet(str(error)) from None
            raise


def _inputs(length_name: str) -> list[InferInput]:
    return [
        _tensor("text_input", np.array([[b"Hello"]], dtype=object)),
        _tensor(length_name, np.array([[1]], np.int32)),
    ]


def _tensor(name: str, value: NDArray[Any]) -> InferInput:
    tensor = InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    tensor.set_data_from_numpy(value)
    return tensor


def _infer_stream(client: InferenceServerClient, model: str, inputs: list[InferInput]) -> None:
    answers: queue.Queue[InferenceServerException | None] = queue.Queue()

    def receive(result: InferResult | None, error: InferenceServerException | None) -> None:
        answers.put(error)

    client.start_stream(receive, stream_timeout=_TIMEOUT_S)
    try:
        client.async_stream_infer(model, inputs)
        if error := answers.get(timeout=_TIMEOUT_S):
            raise error
    finally:
        client.stop_stream()
