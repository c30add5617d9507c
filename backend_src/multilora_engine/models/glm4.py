"""GLM-4: half of each head turns, in neighbouring pairs; gate and up are stored as one linear.

`GlmForCausalLM` has Llama's layers; `Glm4ForCausalLM` (0414) has norms after attention and MLP, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.layers import Attention, GatedMLP, PreNormLayer, SandwichLayer
from multilora_engine.models.model_config import ModelConfig


def _glm_layer(builder: Builder, layer: int) -> PreNormLayer:
    norms = builder.rms_norm("input_layernorm"), builder.rms_norm("post_attention_layernorm")
    return PreNormLayer(builder, Attention(builder, layer), _mlp(builder), norms)


def _glm4_layer(builder: Builder, layer: int) -> SandwichLayer:
    return SandwichLayer(
        Attention(builder, layer),
        _mlp(builder),
        before=(builder.rms_norm("input_layernorm"), builder.rms_norm("post_attention_layernorm")),
        after=(builder.rms_norm("post_self_attn_layernorm"), builder.rms_norm("post_mlp_layernorm")),
    )


def _mlp(builder: Builder) -> GatedMLP:
    return GatedMLP(builder, stored_as="mlp.gate_up_proj")


def read(_fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """Pairs are neighbours; the output projection never has a bias."""
    ropes = {name: replace(rope, is_interleaved=True) for name, rope in config.ropes.items()}
    return replace(config, ropes=ropes, output_bias=False)


GLM = Architecture(_glm_layer)
GLM4 = Architecture(_glm4_layer)
