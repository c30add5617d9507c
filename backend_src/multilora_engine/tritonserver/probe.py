"""Liveness and readiness by a real inference: this server's own endpoints stay green when a model's process has died.

`probe_generation` asks over HTTP (`OverHttp`), or over gRPC (`OverGrpc`) for a server without HTTP. gRPC is imported
only when it is needed: the import is slow, and containers probe often.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any, NoReturn, Protocol

from multilora_wire.headers import bearer

CANARIES: Mapping[str, Mapping[str, object]] = {
    "generation_unary": {"text_input": "Hello", "request_output_len": 1},
    "ensemble": {"text_input": "Hello", "max_tokens": 1},
}
"""The question for each model; together they pass through every model that generates."""

PROBE_TIMEOUT_S = 60.0
LIVE_TIMEOUT_S = 10.0
_ENGINE_SAYS_SO = ("[UNAVAILABLE]", "[INTERNAL]")
"""The engine is starting again, or lost a step because memory ran out; if its steps keep failing it ends itself."""

_QUEUE_IS_FULL = "[UNAVAILABLE] the queue is full"


class ProbeFailed(Exception):
    """The server is broken, and will not mend itself; the text gives the reason."""


class NotReady(Exception):
    """The server does not listen yet, or its engine is starting again or has lost a step."""


class Busy(Exception):
    """The server lives and has too much to do; the text is its error."""


class Transport(Protocol):
    """A way to ask the server at one address."""

    def ask(self, model: str, request: Mapping[str, object], timeout_s: float, api_key: str) -> str | None:
        """The error that a model answers with; None for an answer. Raises TimeoutError, NotReady or ProbeFailed."""

    def check_live(self) -> None:
        """Tells a busy server, which answers this at once, from one that hangs. Raises ProbeFailed."""

    def is_ready(self) -> bool:
        """Whether a server listens and says that its models are loaded."""


def probe_generation(server: Transport, timeout_s: float = PROBE_TIMEOUT_S, api_key: str = "") -> None:
    """Get a token from every canary. Raises ProbeFailed, NotReady or Busy.

    timeout_s: of each. api_key: for a server that has keys.
    """
    for model, request in CANARIES.items():
        try:
            message = server.ask(model, request, timeout_s, api_key)
        except TimeoutError:
            server.check_live()
            raise Busy(f"{model} did not answer in {timeout_s:g} s") from None
        if message is not None:
            _raise_for(model, message)


def _raise_for(model: str, message: str) -> NoReturn:
    if _QUEUE_IS_FULL in message:
        raise Busy(message)
    if any(code in message for code in _ENGINE_SAYS_SO):
        raise NotReady(message)
    raise ProbeFailed(f"{model}: {message}")


class OverHttp:
    """url: `host:port`, without TLS: this server has none for HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, model: str, request: Mapping[str, object], timeout_s: float, api_key: str) -> str | None:
        """See `Transport`."""
        path = f"/v2/models/{model}/generate"
        # Triton passes no header of this interface on to a model: the key goes in the body.
        body = json.dumps({**request, **bearer(api_key)})
        try:
            _, content = self._exchange(path, timeout_s, body)
        except TimeoutError:
            raise
        except (OSError, HTTPException) as error:
            raise NotReady(f"{self._url}: {error}") from None
        try:
            answer = json.loads(content)
        except ValueError:
            raise ProbeFailed(
                f"{self._url}{path}: the answer is no JSON; no server of multilora listens there"
            ) from None
        if isinstance(answer, dict):
            return str(answer["error"]) if "error" in answer else None
        return str(answer)

    def check_live(self) -> None:
        """See `Transport`."""
        try:
            self._exchange("/v2/health/live", LIVE_TIMEOUT_S)
        except (OSError, HTTPException) as error:
            raise ProbeFailed(f"the server hangs: {error}") from None

    def is_ready(self) -> bool:
        """See `Transport`."""
        try:
            status, _ = self._exchange("/v2/health/ready", LIVE_TIMEOUT_S)
        except (OSError, HTTPException):
            return False
        return status == HTTPStatus.OK

    def _exchange(self, path: str, timeout_s: float, body: str | None = None) -> tuple[int, bytes]:
        """Status and body of an answer. Raises OSError or HTTPException."""
        with contextlib.closing(HTTPConnection(self._url, timeout=timeout_s)) as connection:
            connection.sock = connect((connection.host, connection.port), timeout_s)
            connection.request("GET" if body is None else "POST", path, body)
            response = connection.getresponse()
            return response.status, response.read()


class OverGrpc:
    """url: `host:port`, without TLS."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, model: str, request: Mapping[str, object], timeout_s: float, api_key: str) -> str | None:
        """See `Transport`."""
        import grpc  # type: ignore[import-untyped]

        metadata = tuple(bearer(api_key).items())
        with self._stub() as stub:
            try:
                # As a stream, which takes models with one response and with many, and to its end: nothing is cancelled.
                messages = iter([_grpc_request(model, request)])
                responses = list(stub.ModelStreamInfer(messages, timeout=timeout_s, metadata=metadata))
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise TimeoutError from None
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    raise NotReady(error.details()) from None
                return str(error.details())
        return next((response.error_message for response in responses if response.error_message), None)

    def check_live(self) -> None:
        """See `Transport`."""
        import grpc
        from tritonclient.grpc import service_pb2

        with self._stub() as stub:
            try:
                stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=LIVE_TIMEOUT_S)
            except grpc.RpcError as error:
                raise ProbeFailed(f"the server hangs: {error.details()}") from None

    def is_ready(self) -> bool:
        """See `Transport`."""
        import grpc
        from tritonclient.grpc import service_pb2

        host, _, port = self._url.rpartition(":")
        try:
            # gRPC would connect to itself, see `connect`.
            connect((host, int(port)), LIVE_TIMEOUT_S).close()
        except OSError:
            return False
        with self._stub() as stub:
            try:
                ready: bool = stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=LIVE_TIMEOUT_S).ready
            except grpc.RpcError:
                return False
            return ready

    @contextlib.contextmanager
    def _stub(self) -> Iterator[Any]:
        import grpc
        from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

        with grpc.insecure_channel(self._url) as channel:
            yield GRPCInferenceServiceStub(channel)


def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """A TCP connection to a server. Raises OSError; ConnectionRefusedError where nobody listens.

    A connection to a free port of the range from which the system takes the ports of connections can get that very port
    as its own, and is then a connection to itself. It is reset, so that the port is free for the server at once.
    """
    connection = socket.create_connection(address, timeout_s)
    if connection.getsockname() == connection.getpeername():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        raise ConnectionRefusedError(f"nobody listens at {address[0]}:{address[1]}")
    return connection


def _grpc_request(model: str, request: Mapping[str, object]) -> Any:
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in request.items():
        datatype, data = _tensor(value)
        message.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        message.raw_input_contents.append(data)
    return message


def _tensor(value: object) -> tuple[str, bytes]:
    if isinstance(value, str):
        return "BYTES", struct.pack("<I", len(value.encode())) + value.encode()
    return "INT32", struct.pack("<i", value)
