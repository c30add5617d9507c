"""The verdicts of a probe over gRPC, over real connections to a server whose answers each test chooses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from multilora_engine.errors import EngineUnavailable, InternalError, QueueFull
from multilora_engine.tritonserver.grpc_probe import is_ready_over_grpc, probe_generation_over_grpc
from multilora_engine.tritonserver.probe import CANARIES, Busy, NotReady, ProbeFailed

Answer = Callable[[Any, grpc.ServicerContext], str]


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers a request with an error message, or the empty one."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            yield service_pb2.ModelStreamInferResponse(error_message=self._answer(request, context))

    def ServerLive(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    listening = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Server(answer), listening)
    port = listening.add_insecure_port("127.0.0.1:0")
    listening.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        listening.stop(grace=None).wait()


def always(message: str) -> Answer:
    return lambda request, context: message


def test_every_canary_is_asked_what_it_is_asked_over_http() -> None:
    asked: dict[str, dict[str, object]] = {}

    def answer(request: Any, context: grpc.ServicerContext) -> str:
        values = dict(zip([tensor.name for tensor in request.inputs], request.raw_input_contents, strict=True))
        asked[request.model_name] = {
            name: value[4:].decode() if name == "text_input" else int.from_bytes(value, "little")
            for name, value in values.items()
        }
        return ""

    with server(answer) as url:
        probe_generation_over_grpc(url)
        assert is_ready_over_grpc(url)
    assert asked == CANARIES


def test_a_connection_to_itself_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = bound.getsockname()
    create = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda given, timeout: create(given, timeout, address))
    assert not is_ready_over_grpc("{}:{}".format(*address))


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
def test_what_a_server_says_is_broken_not_ready_or_busy(message: str, error: type[Exception]) -> None:
    with server(always(message)) as url, pytest.raises(error):
        probe_generation_over_grpc(url)


def test_a_call_that_is_refused_is_broken() -> None:
    def refuse(request: Any, context: grpc.ServicerContext) -> str:
        context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        raise AssertionError

    with server(refuse) as url, pytest.raises(ProbeFailed, match="no such model"):
        probe_generation_over_grpc(url)


def test_a_server_that_is_slow_is_busy_when_it_says_that_it_lives() -> None:
    ended = threading.Event()

    def wait(request: Any, context: grpc.ServicerContext) -> str:
        ended.wait()
        return ""

    with server(wait) as url:
        try:
            with pytest.raises(Busy):
                probe_generation_over_grpc(url, timeout_s=0.3)
        finally:
            ended.set()


def test_where_nobody_listens_is_not_ready() -> None:
    with server(always("")) as url:
        pass
    with pytest.raises(NotReady, match="Connection refused"):
        probe_generation_over_grpc(url)
    assert not is_ready_over_grpc(url)
