"""Sends a WireRequest unchanged through gRPC or HTTP, and names the outcome in a word."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from trials.wire_requests import WireRequest, WireTensor

ANSWERED = "answered"
REFUSED_BY_TRITON = "refused by Triton"
"""Triton's own checks come before ours. They have a status, where the door has one, and no code in the text."""

_CODE = re.compile(r"\[([A-Z_]+)\] ")
_PARSE_ERROR = re.compile("failed to parse|[Uu]nable to parse")
"""Triton's HTTP door says 500 to JSON that it cannot read."""

_REFUSALS = frozenset(["INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "ALREADY_EXISTS"])


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request. word: ANSWERED, the error's code, REFUSED_BY_TRITON, or the failure."""

    word: str
    detail: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the outcome is an answer, or an error that tells the sender the fault."""
        return self.word in _RIGHT


_RIGHT = frozenset({ANSWERED, REFUSED_BY_TRITON}) | frozenset(
    ["INVALID_ARG", "UNSUPPORTED", "NOT_FOUND", "ALREADY_EXISTS", "UNAVAILABLE", "CANCELLED", "DEADLINE"]
)

_ANY_SIZE = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
"""Messages of any size, as in tritonclient: an answer that repeats a prompt of megabytes is an answer."""


@dataclass
class Doors:
    """Connections of one thread to one server. timeout_s: the time limit of an answer."""

    grpc_url: str
    http_url: str
    timeout_s: float
    _stub: Any = field(init=False)
    _channel: Any = field(init=False)

    def __post_init__(self) -> None:
        self._channel = grpc.insecure_channel(self.grpc_url, _ANY_SIZE)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def ask(self, request: WireRequest) -> Outcome:
        """Send a request to its door, and wait for the end of the answer."""
        if request.door.startswith("gRPC"):
            return self._ask_grpc(self._stream if "stream" in request.door else self._unary, grpc_message(request))
        path, body, headers = http_call(request)
        return self._ask_http(path, body, headers)

    def _ask_grpc(self, ask: Callable[[Any], Outcome], message: Any) -> Outcome:
        try:
            return ask(message)
        except grpc.RpcError as error:
            status, details = error.code().name, error.details() or ""
            if status == "DEADLINE_EXCEEDED":
                return Outcome("no answer in time")
            return _refusal(details, status, status in _REFUSALS)

    def _unary(self, message: Any) -> Outcome:
        self._stub.ModelInfer(message, timeout=self.timeout_s)
        return Outcome(ANSWERED)

    def _stream(self, message: Any) -> Outcome:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        is_final, error = False, ""
        for response in self._stub.ModelStreamInfer(iter([message]), timeout=self.timeout_s):
            if is_final:
                return Outcome("more after the final response")
            error = response.error_message
            is_final = bool(error) or response.infer_response.parameters["triton_final_response"].bool_param
        if not is_final:
            return Outcome("no final response")
        return _refusal(error, "", is_refusal=True) if error else Outcome(ANSWERED)

    def _ask_http(self, path: str, body: bytes, headers: dict[str, str]) -> Outcome:
        connection = http.client.HTTPConnection(self.http_url, timeout=self.timeout_s)
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return http_outcome(answer.status, answer.read())
        except TimeoutError:
            return Outcome("no answer in time")
        except (OSError, http.client.HTTPException) as error:
            return Outcome("connection lost", repr(error))
        finally:
            connection.close()


def _refusal(text: str, status: str, is_refusal: bool) -> Outcome:
    """The outcome of a text. is_refusal: whether `status` alone, without a code in the text, blames the request."""
    if match := _CODE.search(text):
        return Outcome(match[1], text)
    return Outcome(REFUSED_BY_TRITON if is_refusal else f"status {status}", text)


def http_outcome(status: int, content: bytes) -> Outcome:
    """The outcome of a whole body: an event stream that has begun says 200 and tells its error in an event."""
    text = content.decode("utf-8", "replace")
    if status != 200 or '{"error":' in text:
        is_refusal = status < 500 or _PARSE_ERROR.search(text) is not None
        return _refusal(text, f"HTTP {status}", is_refusal)
    return Outcome(ANSWERED)


def grpc_message(request: WireRequest) -> Any:
    message = service_pb2.ModelInferRequest(
        model_name=request.model, model_version=request.version, id=request.request_id
    )
    for tensor in request.tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    for name in request.outputs:
        message.outputs.add(name=name)
    for name, value in request.parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    return message


def http_call(request: WireRequest) -> tuple[str, bytes, dict[str, str]]:
    """Path, body and headers."""
    version = f"/versions/{request.version}" if request.version else ""
    method = next(word for word in ("generate_stream", "generate", "infer") if word in request.door)
    path = f"/v2/models/{request.model}{version}/{method}"
    if method == "infer":
        head, tail = json.dumps(_infer_json(request)).encode(), b"".join(t.data for t in request.tensors)
    else:
        head, tail = json.dumps(_generate_json(request)).encode(), b""
    if request.body_damage is not None:
        head = request.body_damage(head)
    headers = {"Inference-Header-Content-Length": str(len(head))} if method == "infer" else {}
    return path, head + tail, headers | {"Content-Type": "application/json"}


def _infer_json(request: WireRequest) -> dict[str, Any]:
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in request.tensors
    ]
    outputs = {"outputs": [{"name": name} for name in request.outputs]} if request.outputs else {}
    binary = {} if request.outputs else {"binary_data_output": True}
    return {"id": request.request_id, "inputs": inputs, "parameters": request.parameters | binary} | outputs


def _generate_json(request: WireRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": request.request_id} if request.request_id else {}
    for tensor in request.tensors:
        values = _values(tensor)
        fields[tensor.name] = values[0] if len(values) == 1 else values
    return fields


def _values(tensor: WireTensor) -> list[Any]:
    """The values of a tensor as JSON; bytes that do not fit its type become text."""
    try:
        if tensor.datatype == "BYTES":
            return [text.decode("utf-8", "surrogateescape") for text in deserialize_bytes_tensor(tensor.data).tolist()]
        values: list[Any] = np.frombuffer(tensor.data, triton_to_np_dtype(tensor.datatype)).tolist()
        return values
    except Exception:  # the bytes cannot be read as this type
        return [tensor.data.decode("latin-1")]
