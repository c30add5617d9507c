"""Triton over gRPC: `ModelInfer`, and one `ModelStreamInfer` call per stream, so that each can be cancelled alone."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Generator
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

from multilora_client.errors import MultiloraClientError, ServerUnreachable, TimedOut, Unavailable, parse_error
from multilora_client.messages import InferRequest, Response
from multilora_client.tensors import flat_values
from multilora_client.tls import Tls
from multilora_client.transport import GRACE_S

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Otherwise a server that was away for a minute stays away for up to two more.
    ("grpc.max_reconnect_backoff_ms", 2000),
]
_OUR_CODE = re.compile(r"\[[A-Z_]+\] ")
_SPEAKS_HTTP_1 = "Failed parsing HTTP/2"
_CODES = {"INVALID_ARGUMENT": "INVALID_ARG", "UNIMPLEMENTED": "UNSUPPORTED"}


class GrpcTransport:
    """Blocking transport to `target` (`host:port`); without `tls` in plain text."""

    streams_tensors = True

    def __init__(self, target: str, *, tls: Tls | None = None) -> None:
        self._target = target
        self._channel = (
            grpc.secure_channel(target, tls.channel_credentials(), _OPTIONS)
            if tls
            else grpc.insecure_channel(target, _OPTIONS)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def infer(self, request: InferRequest) -> Response:
        try:
            return _response(self._stub.ModelInfer(_message(request), **_call_options(request)))
        except grpc.RpcError as error:
            raise _error(error, self._target, request) from error

    def stream(self, request: InferRequest) -> Generator[Response, None, None]:
        call = self._stub.ModelStreamInfer(iter([_stream_message(request)]), **_call_options(request))
        try:
            ending = None
            for message in call:
                answer = _stream_answer(message, request)
                if isinstance(answer, Response) and not answer.is_final:
                    yield answer
                else:
                    ending = answer
            yield _last(ending, request)
        except grpc.RpcError as error:
            raise _error(error, self._target, request) from error
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()


class AsyncGrpcTransport:
    """asyncio transport to `target` (`host:port`); without `tls` in plain text."""

    streams_tensors = True

    def __init__(self, target: str, *, tls: Tls | None = None) -> None:
        self._target = target
        self._channel = (
            grpc.aio.secure_channel(target, tls.channel_credentials(), _OPTIONS)
            if tls
            else grpc.aio.insecure_channel(target, _OPTIONS)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def infer(self, request: InferRequest) -> Response:
        try:
            return _response(await self._stub.ModelInfer(_message(request), **_call_options(request)))
        except grpc.RpcError as error:
            raise _error(error, self._target, request) from error

    async def stream(self, request: InferRequest) -> AsyncGenerator[Response, None]:
        call = self._stub.ModelStreamInfer(iter([_stream_message(request)]), **_call_options(request))
        try:
            ending = None
            async for message in call:
                answer = _stream_answer(message, request)
                if isinstance(answer, Response) and not answer.is_final:
                    yield answer
                else:
                    ending = answer
            yield _last(ending, request)
        except grpc.RpcError as error:
            raise _error(error, self._target, request) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


def _message(request: InferRequest) -> Any:
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    for name, tensor in request.inputs.items():
        message.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    if request.timeout_s is not None:
        message.parameters["timeout"].int64_param = round(request.timeout_s * 1e6)
    return message


def _stream_message(request: InferRequest) -> Any:
    """Asks for the final flag even where no data come with it: the answer to a stop request is such a response."""
    message = _message(request)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def _call_options(request: InferRequest) -> dict[str, Any]:
    deadline_s = None if request.timeout_s is None else request.timeout_s + GRACE_S
    return {"timeout": deadline_s, "metadata": tuple(request.headers.items())}


def _response(message: Any) -> Response:
    outputs = {
        output.name: flat_values(output.datatype, data)
        for output, data in zip(message.outputs, message.raw_output_contents, strict=True)
    }
    shapes = {output.name: list(output.shape) for output in message.outputs}
    return Response(outputs, message.parameters["triton_final_response"].bool_param, shapes)


def _stream_answer(message: Any, request: InferRequest) -> Response | MultiloraClientError:
    if message.error_message:
        return parse_error(message.error_message, request_id=request.request_id)
    return _response(message.infer_response)


def _last(ending: Response | MultiloraClientError | None, request: InferRequest) -> Response:
    """The error that ended a stream, handed on only when the server has closed its side.

    Cancelling a call between its last response and its end can leave Triton (24.10) waiting for it when it
    shuts down.
    """
    if ending is None:
        raise Unavailable("the stream ended before its final response", request_id=request.request_id)
    if isinstance(ending, MultiloraClientError):
        raise ending
    return ending


def _error(error: grpc.RpcError, target: str, request: InferRequest) -> MultiloraClientError:
    """The error of a call that failed as a whole. UNAVAILABLE without our code in its text: no server answered."""
    status = error.code().name
    if status == "DEADLINE_EXCEEDED":
        return TimedOut(f"no answer within {request.timeout_s} s", request_id=request.request_id)
    details = error.details() or status
    if status == "UNAVAILABLE" and not _OUR_CODE.search(details):
        hint = f"; if it is the server's HTTP port, write http://{target}" if _SPEAKS_HTTP_1 in details else ""
        return ServerUnreachable(f"no server answers at {target}: {details}{hint}", request_id=request.request_id)
    return parse_error(details, status=_CODES.get(status, status), request_id=request.request_id)
