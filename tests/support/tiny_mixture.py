"""A mixture of experts of a few thousand random parameters, beside `checkpoints.tiny_llama`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from checkpoints.tiny_llama import VOCAB_SIZE


def save_tiny_mixture(path: Path, num_hidden_layers: int = 2) -> Path:
    """Write the checkpoint: layers 0, 2, ... are dense, the others have experts and a shared one. No end token."""
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4}
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2}
    config = Qwen2MoeConfig(
        **shape,
        **experts,
        shared_expert_intermediate_size=40,
        num_hidden_layers=num_hidden_layers,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
    )
    torch.manual_seed(7)
    Qwen2MoeForCausalLM(config).save_pretrained(path)
    return path
