"""An engine server in a thread of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from multilora_engine.process.liveness import DrainOrder, Heartbeat, heartbeat_file
from multilora_engine.process.server import ServedEngine, serve
from multilora_engine.process.telemetry import AdapterUsage
from support.fake_engine import FakeEngine
from support.fronts import TIMEOUT_S


def new_heartbeat(interval_s: float | None = None) -> Heartbeat:
    fd = heartbeat_file()
    try:
        return Heartbeat(fd, interval_s)
    finally:
        os.close(fd)


@contextmanager
def served(engine: ServedEngine, socket_path: Path, heartbeat: Heartbeat | None = None) -> Iterator[DrainOrder]:
    """Serve `engine` at `socket_path` until the context ends; it takes no more requests when the order is given."""
    heartbeat = heartbeat or new_heartbeat()
    parent_fd, writer_fd = os.pipe()
    ready = threading.Event()

    def run() -> None:
        with suppress(RuntimeError):
            serve(engine, socket_path, parent_fd, AdapterUsage(max_adapters=2), heartbeat, drain, ready.set)

    with closing(DrainOrder(socket_path)) as drain:
        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(TIMEOUT_S)
        try:
            yield drain
        finally:
            if isinstance(engine, FakeEngine):
                engine.step_gate.set()
            os.close(writer_fd)
            thread.join(TIMEOUT_S)
            os.close(parent_fd)
    assert not thread.is_alive()
