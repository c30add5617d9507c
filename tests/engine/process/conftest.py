"""An engine server over a fake engine, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_engine import INFO, FakeEngine
from support.fronts import TIMEOUT_S
from support.served_engine import served

from multilora_engine.process.client import EngineClient


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@pytest.fixture
def engine(socket_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    """With the client policy that a test gives."""
    engine = FakeEngine()
    engine.info = replace(INFO, clients=getattr(request, "param", INFO.clients))
    with served(engine, socket_path):
        yield engine


@pytest.fixture
def client(engine: FakeEngine, socket_path: Path) -> Iterator[EngineClient]:
    client = EngineClient(socket_path)
    client.wait_until_ready(TIMEOUT_S)
    yield client
    client.close()
