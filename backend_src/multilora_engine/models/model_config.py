"""`ModelConfig`: the shape of a checkpoint, read from its Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """What the model definition, the KV cache and the adapter format need to know of a Llama-family checkpoint.

    rope_scaling: the normalised Hugging Face dict (`rope_type` llama3, linear, yarn, dynamic; `factor`, ...), or None.
    sliding_window: one entry per layer, keys further back than this are not attended to; None is full attention.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...]
    dtype: str
    end_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
