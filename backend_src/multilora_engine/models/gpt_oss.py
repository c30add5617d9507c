"""gpt-oss (arXiv:2508.10925): sinks in attention, windows in every second layer, and a mixture in every layer.

Its router and its experts have biases, and the experts have a gate of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from multilora_engine.errors import ConfigError
from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.layers import STACKED_EXPERTS, Attention, PreNormLayer, SparseMLP
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.moe import with_routing

_EXPERTS = replace(STACKED_EXPERTS, router="router", is_interleaved=True)
_ALPHA = 1.702
"""Of the gate's sigmoid, as the operator has it."""


def _layer(builder: Builder, layer: int) -> PreNormLayer:
    attention, mlp = Attention(builder, layer, has_sinks=True), SparseMLP(builder, _EXPERTS)
    norms = builder.rms_norm("input_layernorm"), builder.rms_norm("post_attention_layernorm")
    return PreNormLayer(builder, attention, mlp, norms)


def read(fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """The gate has no other activation, whatever `hidden_act` says. The shares of the chosen experts add up to 1."""
    alpha, limit = fields["swiglu_alpha"], fields["swiglu_limit"]
    if alpha != _ALPHA:
        raise ConfigError(f"config.json: swiglu_alpha {alpha} is not supported; supported is: {_ALPHA}")
    if not limit > 0:
        raise ConfigError(f"config.json: swiglu_limit {limit} must be positive")
    config = replace(config, activation="silu", mlp_bias=True, clamp_limit=float(limit))
    return with_routing(fields, config, is_normalised=True)


GPT_OSS = Architecture(_layer)
