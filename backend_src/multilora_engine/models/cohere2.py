"""Cohere 2 (Command R7B): attention and MLP side by side on one layer norm; global layers have no rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.layers import Attention, GatedMLP, LayerInputs
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.norms import LayerNorm
from multilora_kernels import KVRows, PackedLayer


class Cohere2Layer:
    """x += attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, builder: Builder, layer: int) -> None:
        self.attention = Attention(builder, layer)
        self._mlp = GatedMLP(builder)
        self._norm = builder.layer_norm("input_layernorm", has_bias=False)

    def packed(self) -> PackedLayer | None:
        return None

    def forward(
        self, x: torch.Tensor, update: torch.Tensor, keys: KVRows, values: KVRows, inputs: LayerInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, x = self._norm.add(x, update)
        return x, self.attention.forward(normed, keys, values, inputs) + self._mlp.forward(normed, inputs.lora)


def _final_norm(builder: Builder) -> LayerNorm:
    return builder.layer_norm("norm", has_bias=False)


def read(fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """Neighbouring elements turn in pairs, in layers with a window only; logits are scaled."""
    ropes = {name: replace(rope, is_interleaved=True) for name, rope in config.ropes.items()}
    pairs = zip(config.layer_ropes, fields["layer_types"], strict=True)
    layer_ropes = tuple(rope if kind == "sliding_attention" else None for rope, kind in pairs)
    return replace(config, ropes=ropes, layer_ropes=layer_ropes, logit_scale=fields["logit_scale"])


COHERE2 = Architecture(Cohere2Layer, _final_norm)
