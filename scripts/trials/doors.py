"""The addresses of a server, and a minimal gRPC client of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from multilora_wire.headers import CLIENT_HEADER, bearer

TIMEOUT_S = 150.0
"""The time limit of one request."""

STREAMING_MODEL = "generation"

GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True)
class Doors:
    """Each URL is `host:port`: of the server or of the proxy before it, and of OpenAI's front, empty if there is none.

    key: the client's API key; empty where the server has no keys.
    """

    http_url: str
    grpc_url: str
    openai_url: str = ""
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request."""
        return bearer(self.key)


Attack = Callable[[Doors], str]
"""Carries out an attack and returns the answers that the attacker got, in a few words. Raises Leak."""


class Leak(Exception):
    """An attacker has learnt of another client. The message names the fact and the way."""


def infer_request(model: str, request_id: str = "", **tensors: Any) -> service_pb2.ModelInferRequest:
    """A request with a batch of plain values for each tensor; texts are BYTES, whole numbers INT32."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, values in tensors.items():
        array = _array(values)
        request.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        is_text = array.dtype == np.object_
        request.raw_input_contents.append(serialize_byte_tensor(array).item() if is_text else array.tobytes())
    return request


def ask(stub: GRPCInferenceServiceStub, doors: Doors, request: service_pb2.ModelInferRequest, client: str = "") -> str:
    """`answered`, or the code of the error. client: the client that the request names as its sender.

    The model that streams is asked by a stream of one request.
    """
    metadata = [*(doors.headers | ({CLIENT_HEADER: client} if client else {})).items()]
    try:
        if request.model_name == STREAMING_MODEL:
            *_, last = stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S, metadata=metadata)
            return last.error_message.partition("]")[0].strip("[") or "answered"
        stub.ModelInfer(request, timeout=TIMEOUT_S, metadata=metadata)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "answered"


def answers(
    doors: Doors, requests: Sequence[service_pb2.ModelInferRequest], at_once: int = 8, clients: Sequence[str] = ()
) -> str:
    """Send requests, `at_once` at a time; their answers with their numbers. clients: the sender that each names."""
    with grpc.insecure_channel(doors.grpc_url, GRPC_OPTIONS) as channel, ThreadPoolExecutor(at_once) as pool:
        send = partial(ask, GRPCInferenceServiceStub(channel), doors)
        return told(pool.map(send, requests, clients or [""] * len(requests)))


def told(seen: Iterable[str]) -> str:
    """The three most frequent answers, with their numbers."""
    return ", ".join(f"{number} x {answer}" for answer, number in Counter(seen).most_common(3))


def _array(values: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(values)
    if array.dtype.kind == "U":
        return np.asarray([[text.encode() for text in row] for row in values], np.object_)
    return array.astype({"i": np.int32, "f": np.float32}.get(array.dtype.kind, array.dtype))
