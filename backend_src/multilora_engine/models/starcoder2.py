"""StarCoder 2 (arXiv:2402.19173): layer norms, biases everywhere, and an MLP of two linears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.layers import Attention, PlainMLP, PreNormLayer
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.norms import LayerNorm


def _layer(builder: Builder, layer: int) -> PreNormLayer:
    norms = (
        builder.layer_norm("input_layernorm", has_bias=True),
        builder.layer_norm("post_attention_layernorm", has_bias=True),
    )
    return PreNormLayer(builder, Attention(builder, layer), PlainMLP(builder), norms)


def _final_norm(builder: Builder) -> LayerNorm:
    return builder.layer_norm("norm", has_bias=True)


def read(fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """One setting decides about all biases."""
    has_bias = fields["use_bias"]
    return replace(config, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=has_bias)


STARCODER2 = Architecture(_layer, _final_norm)
