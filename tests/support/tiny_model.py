"""A Llama of a few thousand random parameters: everything but the answers is as in a real one."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 311


def save_tiny_llama(path: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """Write the checkpoint (without a tokenizer) into `path`. Context 512, no end token."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path
