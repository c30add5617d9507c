"""A stub without a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_engine import FakeEngine
from support.fake_triton import fake_backend_utils
from support.fronts import TIMEOUT_S

from multilora_engine.serving.front import EngineLink
from multilora_engine.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def backend_utils(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_backend_utils())


@pytest.fixture(scope="session")
def tokenizer(default_model_dir: Path) -> Tokenizer:
    return Tokenizer(default_model_dir)


@pytest.fixture
def link(engine: FakeEngine, tmp_path: Path) -> Iterator[EngineLink]:
    """To the fake engine that a test file serves."""
    link = EngineLink(tmp_path / "engine.sock")
    link.client.wait_until_ready(TIMEOUT_S)
    yield link
    link.close()
