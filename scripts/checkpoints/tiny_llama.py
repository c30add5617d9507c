"""A Llama of a few thousand random parameters: everything but the answers is as in a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 311
HIDDEN_SIZE = 32
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_tiny_llama(path: Path, **changes: Any) -> Path:
    """Write the checkpoint (without a tokenizer) into `path`. Context 512, no end token.

    changes: other values of transformers' LlamaConfig.
    """
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**_SHAPE | changes)).save_pretrained(path)
    return path
