"""`KVGroup`: layers whose keys and values have one shape and lie in the same blocks of the KV cache.

Every family that is served has one group, of all its layers: a block holds the keys and values of its tokens in every
layer, from their computation to the end of the sequence. A layer with a window attends to its window alone, and yet
keeps every token: a window saves time, and no memory. Groups of their own, for layers with windows or other heads,
would each need a pool of blocks, a block table of each sequence and keys of prefixes; `only_group` refuses them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def only_group(groups: Sequence[KVGroup]) -> KVGroup:
    """The group of all layers of a model. The KV cache has room for no other."""
    assert len(groups) == 1, f"the KV cache holds one group of layers, and the model has {len(groups)}"
    return groups[0]
