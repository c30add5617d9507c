"""A stub without a server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.fake_triton import fake_backend_utils

from multilora_engine.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def backend_utils(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_backend_utils())


@pytest.fixture(scope="session")
def tokenizer(default_model_dir: Path) -> Tokenizer:
    return Tokenizer(default_model_dir)
