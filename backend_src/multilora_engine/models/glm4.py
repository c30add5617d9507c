"""GLM-4: half of each head turns, in neighbouring pairs; gate and up are stored as one linear.

`GlmForCausalLM` has Llama's layers; `Glm4ForCausalLM` (0414) has norms behind attention and MLP, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.hf_config import WINDOWS, HFConfig
from multilora_engine.models.layers import Attention, GatedMLP, PreNormLayer, SandwichLayer
from multilora_engine.models.model_config import ModelConfig


class GlmConfig(HFConfig):
    unread: ClassVar[tuple[str, ...]] = (*WINDOWS, "mlp_bias")
    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_attention_heads: int = 32
    num_key_value_heads: int = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    hidden_act: str = "silu"
    rms_norm_eps: float = 0.00000015625
    attention_bias: bool = True
    partial_rotary_factor: float | None = 0.5


class Glm4Config(GlmConfig):
    head_dim: int = 128


def _glm_layer(builder: Builder, layer: int) -> PreNormLayer:
    norms = builder.rms_norm("input_layernorm"), builder.rms_norm("post_attention_layernorm")
    return PreNormLayer(builder, Attention(builder, layer), _mlp(builder), norms)


def _glm4_layer(builder: Builder, layer: int) -> SandwichLayer:
    return SandwichLayer(
        Attention(builder, layer),
        _mlp(builder),
        before=(builder.rms_norm("input_layernorm"), builder.rms_norm("post_attention_layernorm")),
        behind=(builder.rms_norm("post_self_attn_layernorm"), builder.rms_norm("post_mlp_layernorm")),
    )


def _mlp(builder: Builder) -> GatedMLP:
    return GatedMLP(builder, stored_as="mlp.gate_up_proj")


def read(_hf: GlmConfig, config: ModelConfig) -> ModelConfig:
    """Pairs are neighbours; the output projection never has a bias."""
    ropes = {name: replace(rope, is_interleaved=True) for name, rope in config.ropes.items()}
    return replace(config, ropes=ropes, output_bias=False)


GLM = Architecture(_glm_layer)
GLM4 = Architecture(_glm4_layer)
