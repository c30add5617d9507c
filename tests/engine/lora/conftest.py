"""A reader of what folders say about their adapters' use, for the default model."""

from __future__ import annotations

from pathlib import Path

import pytest

from multilora_engine.lora.folder_use import UseReader
from multilora_engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def reader(default_model_dir: Path) -> UseReader:
    tokenizer = Tokenizer(default_model_dir)
    return UseReader(tokenizer, default_model_dir, tokenizer.vocab_size)
