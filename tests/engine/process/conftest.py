"""An engine server over a fake engine, in a thread of its own, and a client of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from multilora_engine.process.client import EngineClient
from multilora_engine.process.server import serve
from support.fake_engine import FakeEngine
from support.fronts import TIMEOUT_S


@contextmanager
def _served(engine: FakeEngine, socket_path: Path) -> Iterator[None]:
    parent_fd, writer_fd = os.pipe()
    ready = threading.Event()

    def run() -> None:
        with suppress(RuntimeError):
            serve(engine, socket_path, parent_fd, ready.set)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(TIMEOUT_S)
    try:
        yield
    finally:
        engine.step_gate.set()
        os.close(writer_fd)
        thread.join(TIMEOUT_S)
        os.close(parent_fd)
    assert not thread.is_alive()


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@pytest.fixture
def engine(socket_path: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine()
    with _served(engine, socket_path):
        yield engine


@pytest.fixture
def client(engine: FakeEngine, socket_path: Path) -> Iterator[EngineClient]:
    client = EngineClient(socket_path)
    client.wait_until_ready(TIMEOUT_S)
    yield client
    client.close()
