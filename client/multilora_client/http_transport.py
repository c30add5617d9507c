"""Triton over HTTP: `infer` with binary tensors, `generate_stream` with JSON and server-sent events.

The JSON of `generate_stream` carries neither an adapter nor a timeout: `streams_tensors` is False, so that clients
upload first, and a stream's deadline is kept here, by closing the connection, which cancels the request.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any

import httpx2

from multilora_client.errors import MultiloraClientError, ServerUnreachable, TimedOut, Unavailable, parse_error
from multilora_client.messages import InferRequest, Response
from multilora_client.tensors import Tensor, flat_values
from multilora_client.tls import Tls
from multilora_client.transport import GRACE_S

_HEADER_LENGTH = "Inference-Header-Content-Length"
_CONNECT_TIMEOUT_S = 10.0
_MAX_QUOTED = 200
_SPEAKS_NO_HTTP = "illegal request line"
_CODES = {400: "INVALID_ARG", 404: "NOT_FOUND", 500: "INTERNAL", 501: "UNSUPPORTED", 503: "UNAVAILABLE"}


class HttpTransport:
    """Blocking transport to `base_url`. `http_transport` replaces the network in tests."""

    streams_tensors = False

    def __init__(
        self, base_url: str, *, tls: Tls | None = None, http_transport: httpx2.BaseTransport | None = None
    ) -> None:
        self._base_url = base_url
        self._http = httpx2.Client(base_url=base_url, verify=_verify(tls), transport=http_transport)

    def infer(self, request: InferRequest) -> Response:
        try:
            return _response(self._http.post(**_infer_call(request)), request)
        except httpx2.HTTPError as error:
            raise _error(error, self._base_url, request) from error

    def stream(self, request: InferRequest) -> Generator[Response, None, None]:
        started = time.monotonic()
        try:
            with self._http.stream("POST", **_stream_call(request)) as answer:
                if not answer.is_success:
                    raise _refusal(answer.status_code, answer.read(), request)
                for line in answer.iter_lines():
                    _check_deadline(started, request)
                    yield from _event(line, request)
        except httpx2.HTTPError as error:
            raise _error(error, self._base_url, request) from error

    def close(self) -> None:
        self._http.close()


class AsyncHttpTransport:
    """asyncio transport to `base_url`. `http_transport` replaces the network in tests."""

    streams_tensors = False

    def __init__(
        self, base_url: str, *, tls: Tls | None = None, http_transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self._base_url = base_url
        self._http = httpx2.AsyncClient(base_url=base_url, verify=_verify(tls), transport=http_transport)

    async def infer(self, request: InferRequest) -> Response:
        try:
            return _response(await self._http.post(**_infer_call(request)), request)
        except httpx2.HTTPError as error:
            raise _error(error, self._base_url, request) from error

    async def stream(self, request: InferRequest) -> AsyncGenerator[Response, None]:
        started = time.monotonic()
        try:
            async with self._http.stream("POST", **_stream_call(request)) as answer:
                if not answer.is_success:
                    raise _refusal(answer.status_code, await answer.aread(), request)
                async for line in answer.aiter_lines():
                    _check_deadline(started, request)
                    for response in _event(line, request):
                        yield response
        except httpx2.HTTPError as error:
            raise _error(error, self._base_url, request) from error

    async def close(self) -> None:
        await self._http.aclose()


def _verify(tls: Tls | None) -> ssl.SSLContext | bool:
    return tls.ssl_context() if tls else True


def _infer_call(request: InferRequest) -> dict[str, Any]:
    """Triton's binary extension: a JSON header, then the bytes of all tensors in its order."""
    header: dict[str, Any] = {
        "id": request.request_id,
        "parameters": {"binary_data_output": True} | _timeout_parameter(request),
        "inputs": [_input_header(name, tensor) for name, tensor in request.inputs.items()],
    }
    encoded = json.dumps(header).encode()
    return {
        "url": f"/v2/models/{request.model}/infer",
        "content": b"".join([encoded, *(tensor.data for tensor in request.inputs.values())]),
        "headers": {_HEADER_LENGTH: str(len(encoded)), "Content-Type": "application/octet-stream"} | request.headers,
        "timeout": _timeout(request),
    }


def _input_header(name: str, tensor: Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "datatype": tensor.datatype,
        "shape": tensor.shape,
        "parameters": {"binary_data_size": len(tensor.data)},
    }


def _stream_call(request: InferRequest) -> dict[str, Any]:
    # The server passes no header of this interface on to its models: they find the API key in the body.
    body = {"id": request.request_id} | request.authorization
    return {
        "url": f"/v2/models/{request.model}/generate_stream",
        "json": body | {name: _json_value(tensor) for name, tensor in request.inputs.items()},
        "headers": request.headers,
        "timeout": _timeout(request),
    }


def _json_value(tensor: Tensor) -> Any:
    """A scalar or a flat list: generate adds the batch dimension itself."""
    array = flat_values(tensor.datatype, tensor.data)
    # JSON has no numbers of 32 bits, which FP32 values are.
    values = list(map(float, array)) if tensor.datatype == "FP32" else array
    return values[0] if len(values) == 1 else values


def _timeout_parameter(request: InferRequest) -> dict[str, int]:
    return {} if request.timeout_s is None else {"timeout": round(request.timeout_s * 1e6)}


def _timeout(request: InferRequest) -> httpx2.Timeout:
    waits = None if request.timeout_s is None else request.timeout_s + GRACE_S
    return httpx2.Timeout(waits, connect=_CONNECT_TIMEOUT_S)


def _response(answer: httpx2.Response, request: InferRequest) -> Response:
    if not answer.is_success:
        raise _refusal(answer.status_code, answer.content, request)
    header_length = int(answer.headers.get(_HEADER_LENGTH, len(answer.content)))
    header = json.loads(answer.content[:header_length])
    shapes = {output["name"]: output["shape"] for output in header["outputs"]}
    return Response(_outputs(header["outputs"], answer.content[header_length:]), shapes=shapes)


def _outputs(headers: list[dict[str, Any]], data: bytes) -> dict[str, Sequence[Any]]:
    outputs: dict[str, Sequence[Any]] = {}
    offset = 0
    for header in headers:
        if "data" in header:
            outputs[header["name"]] = header["data"]
            continue
        end = offset + header["parameters"]["binary_data_size"]
        outputs[header["name"]] = flat_values(header["datatype"], data[offset:end])
        offset = end
    return outputs


def _event(line: str, request: InferRequest) -> Generator[Response, None, None]:
    """The response of one line of an event stream; blank lines between events have none."""
    if not line.startswith("data:"):
        return
    event = json.loads(line.removeprefix("data:"))
    if "error" in event:
        raise parse_error(event["error"], request_id=request.request_id)
    yield Response({name: value if isinstance(value, list) else [value] for name, value in event.items()})


def _refusal(status: int, content: bytes, request: InferRequest) -> MultiloraClientError:
    code = _CODES.get(status, f"HTTP_{status}")
    return parse_error(_error_text(content), status=code, request_id=request.request_id)


def _error_text(content: bytes) -> str:
    try:
        # A stream that is refused has its error in the form of an event.
        body: Mapping[str, Any] = json.loads(content.removeprefix(b"data: "))
        return str(body["error"])
    except (ValueError, KeyError, TypeError):
        return content.decode("utf-8", "replace")[:_MAX_QUOTED] or "the server gave no reason"


def _check_deadline(started: float, request: InferRequest) -> None:
    if request.timeout_s is not None and time.monotonic() - started > request.timeout_s:
        raise _timed_out(request)


def _timed_out(request: InferRequest) -> TimedOut:
    return TimedOut(f"no answer within {request.timeout_s} s", request_id=request.request_id)


def _error(error: httpx2.HTTPError, base_url: str, request: InferRequest) -> MultiloraClientError:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return ServerUnreachable(f"no server answers at {base_url}: {error}", request_id=request.request_id)
    if isinstance(error, httpx2.TimeoutException):
        return _timed_out(request)
    if _SPEAKS_NO_HTTP in str(error):
        return Unavailable(
            f"what listens at {base_url} speaks no HTTP ({error}); if it is the server's gRPC port, write grpc://HOST:PORT",
            request_id=request.request_id,
        )
    return Unavailable(f"the connection to {base_url} broke: {error}", request_id=request.request_id)
