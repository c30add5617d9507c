"""Where clients connect to a server, and a client that asks there in gRPC as plainly as can be."""

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

from multilora_engine.client_header import bearer
from multilora_wire.headers import CLIENT_HEADER

TIMEOUT_S = 150.0
"""Of one request."""

STREAMING_MODEL = "generation"

GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True)
class Doors:
    """Each is `host:port`: of the server itself or of the proxy before it, and of OpenAI's front, where there is one.

    key: the API key of who connects; empty where the server has none.
    """

    http_url: str
    grpc_url: str
    openai_url: str = ""
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Of each request."""
        return bearer(self.key)


Attack = Callable[[Doors], str]
"""Carries out an attack and tells in a few words what the attacker met. Raises Leak."""


class Leak(Exception):
    """An attacker has learnt of a client that is none of its own. The message says of what, and by what."""


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
    """`answered`, or the code of the error. client: who the request says that it is from.

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
    """Send requests, so many at once; what they were answered, with how often. clients: who each says to be from."""
    with grpc.insecure_channel(doors.grpc_url, GRPC_OPTIONS) as channel, ThreadPoolExecutor(at_once) as pool:
        send = partial(ask, GRPCInferenceServiceStub(channel), doors)
        return told(pool.map(send, requests, clients or [""] * len(requests)))


def told(seen: Iterable[str]) -> str:
    """The three most frequent of what was seen, with how often."""
    return ", ".join(f"{number} x {answer}" for answer, number in Counter(seen).most_common(3))


def _array(values: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(values)
    if array.dtype.kind == "U":
        return np.asarray([[text.encode() for text in row] for row in values], np.object_)
    return array.astype({"i": np.int32, "f": np.float32}.get(array.dtype.kind, array.dtype))
