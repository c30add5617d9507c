"""`KVGroup`: layers whose keys and values have one shape."""

from __future__ import annotations

from dataclasses import dataclass

from multilora_engine.models.model_config import ModelConfig


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep `num_kv_heads` keys and values of `head_dim` for each token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def values_per_token(self) -> int:
        """Numbers that one token keeps in all layers of the group, keys and values together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def kv_groups(config: ModelConfig) -> tuple[KVGroup, ...]:
    """The groups of a model, layers in order."""
    return (KVGroup(config.num_layers, config.num_kv_heads, config.head_dim),)
