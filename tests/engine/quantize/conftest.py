"""A tiny checkpoint with a tokenizer, and a text for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from checkpoints.tiny_llama import save_tiny_llama


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linears of 64 and 96 inputs, a head of its own, and a token a byte."""
    path = tmp_path_factory.mktemp("models") / "float"
    save_tiny_llama(path, hidden_size=64, intermediate_size=96, tie_word_embeddings=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two windows."""
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 12)
    return file
