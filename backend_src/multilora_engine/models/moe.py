"""Mixtures of experts: Qwen 3 and Qwen 2 (arXiv:2505.09388, 2407.10671), OLMoE (2409.02060), Mixtral (2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from multilora_engine.errors import ConfigError
from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.layers import (
    STACKED_EXPERTS,
    Attention,
    ExpertNames,
    GatedMLP,
    PreNormLayer,
    QKNorm,
    SparseMLP,
)
from multilora_engine.models.llama import head_norm
from multilora_engine.models.model_config import ModelConfig, Routing
from multilora_engine.models.olmo2 import whole_norm
from multilora_wire.module_names import MOE_ROUTER

_MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", ("w1", "w3", "w2"))


def _layer(
    builder: Builder, layer: int, qk_norm: QKNorm | None = None, names: ExpertNames = STACKED_EXPERTS
) -> PreNormLayer:
    """Llama's layer, with experts where the model has them."""
    attention = Attention(builder, layer, qk_norm)
    mlp = SparseMLP(builder, names) if builder.has("mlp.gate") else GatedMLP(builder)
    norms = builder.rms_norm("input_layernorm"), builder.rms_norm("post_attention_layernorm")
    return PreNormLayer(builder, attention, mlp, norms)


def _qwen3_layer(builder: Builder, layer: int) -> PreNormLayer:
    return _layer(builder, layer, head_norm(builder))


def _olmoe_layer(builder: Builder, layer: int) -> PreNormLayer:
    return _layer(builder, layer, whole_norm(builder))


def _mixtral_layer(builder: Builder, layer: int) -> PreNormLayer:
    return _layer(builder, layer, names=_MIXTRAL_EXPERTS)


def read_qwen3(fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    return with_routing(fields, config, fields["norm_topk_prob"])


def read_qwen2(fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """The output of attention never has a bias."""
    return with_routing(
        fields, replace(config, qkv_bias=fields["qkv_bias"], output_bias=False), fields["norm_topk_prob"]
    )


def read_olmoe(fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    if fields["clip_qkv"] is not None:
        raise ConfigError(f"config.json: clip_qkv {fields['clip_qkv']} is not supported; supported is: null")
    return with_routing(fields, config, fields["norm_topk_prob"])


def read_mixtral(fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """Weights of chosen experts always add up to 1."""
    return with_routing(fields, config, is_normalised=True)


def with_routing(fields: Mapping[str, Any], config: ModelConfig, is_normalised: bool) -> ModelConfig:
    """Raises ConfigError for a token with more experts than there are, or an activation that no operator has."""
    routers = [module.out_size for module in config.sites.modules if module.module_id == MOE_ROUTER]
    top_k = fields["num_experts_per_tok"]
    if routers and top_k > routers[0]:
        raise ConfigError(f"config.json: num_experts_per_tok {top_k} is more than the {routers[0]} experts")
    if routers and config.activation != "silu":
        raise ConfigError(
            f"config.json: hidden_act {fields['hidden_act']!r} is not supported for experts; supported is: silu"
        )
    return replace(config, routing=Routing(top_k, is_normalised))


QWEN3_MOE = Architecture(_qwen3_layer)
QWEN2_MOE = Architecture(_layer)
OLMOE = Architecture(_olmoe_layer)
MIXTRAL = Architecture(_mixtral_layer)
