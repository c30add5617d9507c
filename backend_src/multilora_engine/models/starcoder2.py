"""StarCoder 2 (arXiv:2402.19173): layer norms, biases everywhere, and an MLP of two linears."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.hf_config import HFConfig
from multilora_engine.models.layers import Attention, PlainMLP, PreNormLayer
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.norms import LayerNorm

_MLP = ("c_fc", "c_proj")


class Starcoder2Config(HFConfig):
    unread: ClassVar[tuple[str, ...]] = ("layer_types", "attention_bias", "mlp_bias")
    norm_eps_field: ClassVar[str] = "norm_epsilon"
    vocab_size: int = 49152
    hidden_size: int = 3072
    intermediate_size: int = 12288
    num_hidden_layers: int = 30
    num_attention_heads: int = 24
    num_key_value_heads: int = 2
    max_position_embeddings: int = 4096
    hidden_act: str = "gelu_pytorch_tanh"
    norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool = True


def _layer(builder: Builder, layer: int) -> PreNormLayer:
    norms = (
        builder.layer_norm("input_layernorm", has_bias=True),
        builder.layer_norm("post_attention_layernorm", has_bias=True),
    )
    return PreNormLayer(builder, Attention(builder, layer), PlainMLP(builder, _MLP), norms)


def _final_norm(builder: Builder) -> LayerNorm:
    return builder.layer_norm("norm", has_bias=True)


def read(hf: Starcoder2Config, config: ModelConfig) -> ModelConfig:
    """One setting decides about all biases."""
    has_bias = hf.use_bias
    return replace(config, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=has_bias)


STARCODER2 = Architecture(_layer, _final_norm, _MLP)
