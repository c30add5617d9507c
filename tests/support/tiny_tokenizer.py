"""A tokenizer that needs no download."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from checkpoints.tiny_llama import VOCAB_SIZE


def save_tiny_tokenizer(path: Path) -> Path:
    """Write one of a word for each token of the tiny Llama into `path`, which is returned."""
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    return path
