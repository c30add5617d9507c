"""The verdicts of a probe, over real connections to a server whose answers each test chooses."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from multilora_engine.errors import EngineUnavailable, InternalError, QueueFull
from multilora_engine.tritonserver.probe import (
    CANARIES,
    Busy,
    NotReady,
    OverGrpc,
    OverHttp,
    ProbeFailed,
    connect,
    probe_generation,
)

Answer = Callable[[str], tuple[int, dict[str, str]] | None]


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    """Answers a path with a status and a body, or not at all, until the context ends."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answered = answer(self.path)
            if answered is None:
                ended.wait()
                return
            status, body = answered
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.server_address[1]}"
        finally:
            ended.set()
            listening.shutdown()
            thread.join()


def always(status: int, **body: str) -> Answer:
    return lambda _: (status, body)


def test_every_canary_is_asked() -> None:
    asked: list[str] = []

    def answer(path: str) -> tuple[int, dict[str, str]]:
        asked.append(path)
        return 200, {"text_output": "Hi"}

    with server(answer) as url:
        probe_generation(OverHttp(url))
    assert asked == [f"/v2/models/{model}/generate" for model in CANARIES]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (always(500, error="Stub process 'ensemble_0_0' is not healthy."), ProbeFailed),
        (always(200, error="generate expects model to produce exactly 1 response"), ProbeFailed),
        (always(400, error=EngineUnavailable("the engine process died").wire_message("-")), NotReady),
        (always(400, error=InternalError("the step ran out of memory").wire_message("-")), NotReady),
        (always(400, error=QueueFull(4096, 4096, 1.5).wire_message("-")), Busy),
    ],
    ids=["dead stub", "no answer", "engine restarts", "out of memory", "queue full"],
)
def test_what_a_server_says_is_broken_not_ready_or_busy(answer: Answer, error: type[Exception]) -> None:
    with server(answer) as url, pytest.raises(error):
        probe_generation(OverHttp(url))


def test_a_server_that_is_slow_is_busy_when_it_says_that_it_lives() -> None:
    with server(lambda path: (200, {}) if "health" in path else None) as url, pytest.raises(Busy):
        probe_generation(OverHttp(url), timeout_s=0.05)


def test_where_nobody_listens_is_not_ready() -> None:
    with server(always(200)) as url:
        pass
    with pytest.raises(NotReady, match="Connection refused"):
        probe_generation(OverHttp(url))


@pytest.fixture
def own_address(monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """A free port that a connection to it gets as its own."""
    address = ("127.0.0.1", free_port())
    create = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda given, timeout: create(given, timeout, address))
    return address


def test_a_connection_to_itself_is_none_and_leaves_the_port_free_at_once(own_address: tuple[str, int]) -> None:
    with pytest.raises(ConnectionRefusedError, match=f"nobody listens at 127.0.0.1:{own_address[1]}"):
        connect(own_address, 5)
    with socket.socket() as server:  # without SO_REUSEADDR, which would take a port that waits for its last packets
        server.bind(own_address)


def test_a_probe_asks_over_connections_that_are_none_to_themselves(own_address: tuple[str, int]) -> None:
    url = "{}:{}".format(*own_address)
    assert not OverHttp(url).is_ready()
    with pytest.raises(NotReady, match="nobody listens"):
        probe_generation(OverHttp(url))


@pytest.mark.parametrize(
    "answer",
    [b"", b"hello\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nno", b"GET /v2/health/ready HTTP/1.1\r\n\r\n"],
)
def test_what_does_not_speak_http_is_not_ready(answer: bytes) -> None:
    with bytes_server(answer) as url:
        with pytest.raises(NotReady):
            probe_generation(OverHttp(url))
        if not answer.startswith(b"HTTP"):
            assert not OverHttp(url).is_ready()


def test_a_server_that_is_slow_and_no_server_of_http_hangs() -> None:
    def answer(path: str) -> tuple[int, dict[str, str]] | None:
        if "health" in path:
            raise ConnectionAbortedError  # ends the connection without an answer
        return None

    with server(answer) as url, pytest.raises(ProbeFailed, match="hangs"):
        probe_generation(OverHttp(url), timeout_s=0.05)


@pytest.mark.parametrize("status", [200, 404])
def test_a_server_of_something_else_is_named_as_such(status: int) -> None:
    page = b"<html>" + b"x" * 10_000
    head = f"HTTP/1.1 {status} Fine\r\nContent-Length: {len(page)}\r\n\r\n".encode()
    with bytes_server(head + page) as url, pytest.raises(ProbeFailed, match="no server of multilora listens there"):
        probe_generation(OverHttp(url))


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server(always(200, text_output="Hi")) as url:
        probe_generation(OverHttp(url))
        assert OverHttp(url).is_ready()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


@contextmanager
def bytes_server(answer: bytes) -> Iterator[str]:
    """Sends `answer` to whoever connects, whatever is asked, and closes."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()


GrpcAnswer = Callable[[Any, grpc.ServicerContext], str]


class GrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers a request with an error message, or the empty one."""

    def __init__(self, answer: GrpcAnswer) -> None:
        self._answer = answer

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            yield service_pb2.ModelStreamInferResponse(error_message=self._answer(request, context))

    def ServerLive(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)


@contextmanager
def grpc_server(answer: GrpcAnswer) -> Iterator[str]:
    listening = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(GrpcServer(answer), listening)
    port = listening.add_insecure_port("127.0.0.1:0")
    listening.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        listening.stop(grace=None).wait()


def grpc_error(message: str) -> GrpcAnswer:
    return lambda request, context: message


def test_over_grpc_every_canary_is_asked_what_it_is_asked_over_http() -> None:
    asked: dict[str, dict[str, object]] = {}

    def answer(request: Any, context: grpc.ServicerContext) -> str:
        values = dict(zip([tensor.name for tensor in request.inputs], request.raw_input_contents, strict=True))
        asked[request.model_name] = {
            name: value[4:].decode() if name == "text_input" else int.from_bytes(value, "little")
            for name, value in values.items()
        }
        return ""

    with grpc_server(answer) as url:
        probe_generation(OverGrpc(url))
        assert OverGrpc(url).is_ready()
    assert asked == CANARIES


def test_a_connection_to_itself_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = bound.getsockname()
    create = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda given, timeout: create(given, timeout, address))
    assert not OverGrpc("{}:{}".format(*address)).is_ready()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Stub process 'ensemble_0_0' is not healthy.", ProbeFailed),
        (EngineUnavailable("the engine process died").wire_message("-"), NotReady),
        (InternalError("the step ran out of memory").wire_message("-"), NotReady),
        (QueueFull(4096, 4096, 1.5).wire_message("-"), Busy),
    ],
    ids=["dead stub", "engine restarts", "out of memory", "queue full"],
)
def test_over_grpc_what_a_server_says_is_broken_not_ready_or_busy(message: str, error: type[Exception]) -> None:
    with grpc_server(grpc_error(message)) as url, pytest.raises(error):
        probe_generation(OverGrpc(url))


def test_over_grpc_a_call_that_is_refused_is_broken() -> None:
    def refuse(request: Any, context: grpc.ServicerContext) -> str:
        context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        raise AssertionError

    with grpc_server(refuse) as url, pytest.raises(ProbeFailed, match="no such model"):
        probe_generation(OverGrpc(url))


def test_over_grpc_a_server_that_is_slow_is_busy_when_it_says_that_it_lives() -> None:
    ended = threading.Event()

    def wait(request: Any, context: grpc.ServicerContext) -> str:
        ended.wait()
        return ""

    with grpc_server(wait) as url:
        try:
            with pytest.raises(Busy):
                probe_generation(OverGrpc(url), timeout_s=0.3)
        finally:
            ended.set()


def test_over_grpc_where_nobody_listens_is_not_ready() -> None:
    with grpc_server(grpc_error("")) as url:
        pass
    with pytest.raises(NotReady, match="Connection refused"):
        probe_generation(OverGrpc(url))
    assert not OverGrpc(url).is_ready()
