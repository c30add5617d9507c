"""The part of Triton's Python interface that we use, as types, and the module itself, which only a stub has."""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any, Protocol

from numpy.typing import NDArray

from multilora_engine.errors import InvalidRequest, RequestError
from multilora_engine.log_lines import configure_logging
from multilora_wire.end_with_parent import watch_parent

_NEAREST_CODES = {
    "UNAUTHENTICATED": "INVALID_ARG",
    "PERMISSION_DENIED": "INVALID_ARG",
    "RESOURCE_EXHAUSTED": "UNAVAILABLE",
}
"""For each code that Triton does not have, one that it has, for which clients do the right thing: whether to try
again. The message begins with the code itself."""


class TritonTensor(Protocol):
    """`triton_python_backend_utils.Tensor`. The data lies in shared memory and lives as long as its request."""

    def name(self) -> str: ...
    def as_numpy(self) -> NDArray[Any]: ...
    def to_dlpack(self) -> Any: ...


class ResponseSender(Protocol):
    """`InferenceResponseSender`. Only one thread of a stub may ever send."""

    def send(self, response: Any, flags: int) -> None: ...
    def is_cancelled(self) -> bool: ...


class TritonTrace(Protocol):
    """`InferenceTrace`. The context of an OpenTelemetry trace is a JSON object of W3C headers; others have none."""

    def get_context(self) -> str | None: ...


class TritonRequest(Protocol):
    """`triton_python_backend_utils.InferenceRequest`."""

    def inputs(self) -> Sequence[TritonTensor]: ...
    def request_id(self) -> str: ...
    def requested_output_names(self) -> Collection[str]: ...
    def timeout(self) -> int: ...
    def parameters(self) -> str: ...
    def trace(self) -> TritonTrace: ...
    def get_response_sender(self) -> ResponseSender: ...


def prepare_stub(model_name: str) -> None:
    """Send log lines to the server's stderr, end with the server, and keep all imported objects out of garbage
    collections.

    That is up to 200,000 objects: most of the time of a collection, and of the interpreter's end.
    """
    gc.freeze()
    configure_logging(model_name)
    watch_parent()


def backend_utils() -> ModuleType:
    """`triton_python_backend_utils`."""
    return importlib.import_module("triton_python_backend_utils")


def request_id_of(request: TritonRequest) -> str:
    """The request's id; empty for one that is not UTF-8, by which no client could stop the request.

    Reading such an id raises in the middle of `execute`, which would fail all requests that came with this one.
    """
    try:
        return request.request_id()
    except UnicodeDecodeError:
        return ""


def parameters_of(request: TritonRequest, max_metadata_bytes: int) -> dict[str, list[str]]:
    """The values of a request's parameters by name in lower case: the client's own first, then those of headers.

    Raises InvalidRequest.
    """
    values: dict[str, list[str]] = {}
    for name, value in typed_parameters_of(request, max_metadata_bytes):
        values.setdefault(name.lower(), []).append(str(value))
    return values


def typed_parameters_of(request: TritonRequest, max_metadata_bytes: int) -> list[tuple[str, Any]]:
    """The names and values of a request's parameters: the client's own first, then those of headers.

    Raises InvalidRequest.
    """
    try:
        text = request.parameters() or "{}"
    except UnicodeDecodeError:
        raise InvalidRequest("a header or parameter of the request is not UTF-8") from None
    if (num_bytes := len(text.encode())) > max_metadata_bytes:
        raise InvalidRequest(f"the parameters have {num_bytes} bytes; a request may have {max_metadata_bytes}")
    parameters: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
    try:
        json.dumps(parameters, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InvalidRequest(f"a header or parameter of the request has {half!r}, half of a character") from None
    return parameters


def trace_id_of(request: TritonRequest) -> str:
    """32 hexadecimal digits, the client's own if it sent a `traceparent`; empty if the server makes no such traces."""
    context = json.loads(request.trace().get_context() or "{}")
    return context["traceparent"].split("-")[1] if "traceparent" in context else ""


def error_response(error: RequestError, request_id: str) -> Any:
    """The `InferenceResponse` that tells a client of an error."""
    pb = backend_utils()
    code = _NEAREST_CODES.get(error.code, error.code)
    triton_error = pb.TritonError(error.wire_message(request_id), getattr(pb.TritonError, code))
    return pb.InferenceResponse([], error=triton_error)
