"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, none before; queries and keys normalised whole."""

from __future__ import annotations

import torch

from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.layers import Attention, GatedMLP, LayerInputs, WholeNorm
from multilora_kernels import KVRows, PackedLayer


class Olmo2Layer:
    """x += norm(attention(x)); x += norm(mlp(x))."""

    def __init__(self, builder: Builder, layer: int) -> None:
        self.attention = Attention(builder, layer, whole_norm(builder))
        self._mlp = GatedMLP(builder)
        self._attention_norm = builder.rms_norm("post_attention_layernorm")
        self._mlp_norm = builder.rms_norm("post_feedforward_layernorm")

    def packed(self) -> PackedLayer | None:
        return None

    def forward(
        self, x: torch.Tensor, update: torch.Tensor, keys: KVRows, values: KVRows, inputs: LayerInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + update
        x = x + self._attention_norm.forward(self.attention.forward(x, keys, values, inputs))
        return x, self._mlp_norm.forward(self._mlp.forward(x, inputs.lora))


def whole_norm(builder: Builder) -> WholeNorm:
    """Norms of all heads of queries together, and of keys."""
    config = builder.config
    q_norm = builder.rms_norm("self_attn.q_norm", config.q_size)
    return WholeNorm(q_norm, builder.rms_norm("self_attn.k_norm", config.kv_size))


OLMO2 = Architecture(Olmo2Layer)
