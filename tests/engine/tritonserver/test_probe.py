"""The verdicts of a probe, over real connections to a server whose answers each test chooses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from multilora_engine.errors import EngineUnavailable, InternalError, QueueFull
from multilora_engine.tritonserver.probe import CANARIES, Busy, NotReady, ProbeFailed, probe_generation

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
        probe_generation(url)
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
        probe_generation(url)


def test_a_server_that_is_slow_is_busy_when_it_says_that_it_lives() -> None:
    with server(lambda path: (200, {}) if "health" in path else None) as url, pytest.raises(Busy):
        probe_generation(url, timeout_s=0.05)


def test_where_nobody_listens_is_not_ready() -> None:
    with server(always(200)) as url:
        pass
    with pytest.raises(NotReady, match="Connection refused"):
        probe_generation(url)
