"""`KVGroup`: layers whose keys and values have one shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from multilora_engine.models.model_config import ModelConfig
from multilora_kernels import kv_row_size


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep `num_kv_heads` keys and values of `head_dim` for each token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def cache_shape(self, num_slots: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
        """The shape of a `KVCache`'s keys, and of its values, in a dtype."""
        return self.num_layers, num_slots, self.num_kv_heads, kv_row_size(self.head_dim, dtype)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token keeps in all layers of the group, keys and values together."""
        return 2 * math.prod(self.cache_shape(1, dtype)) * dtype.itemsize


def kv_groups(config: ModelConfig) -> tuple[KVGroup, ...]:
    """The groups of a model, layers in order."""
    return (KVGroup(config.num_layers, config.num_kv_heads, config.head_dim),)
