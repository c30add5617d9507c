"""Gemma 2 (arXiv:2408.00118) and the text models of Gemma 3 (arXiv:2503.19786).

Norms stand on both sides of attention and MLP; their weights are stored less one. Local layers attend to a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from multilora_engine.errors import ConfigError
from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.layers import Attention, GatedMLP, SandwichLayer
from multilora_engine.models.llama import head_norm
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.norms import RMSNorm

_NORM_OFFSET = 1.0


def _layer(builder: Builder, layer: int, has_qk_norm: bool) -> SandwichLayer:
    def norms(first: str, second: str) -> tuple[RMSNorm, RMSNorm]:
        return builder.rms_norm(first, offset=_NORM_OFFSET), builder.rms_norm(second, offset=_NORM_OFFSET)

    return SandwichLayer(
        Attention(builder, layer, head_norm(builder, _NORM_OFFSET) if has_qk_norm else None),
        GatedMLP(builder),
        before=norms("input_layernorm", "pre_feedforward_layernorm"),
        after=norms("post_attention_layernorm", "post_feedforward_layernorm"),
    )


def _gemma2_layer(builder: Builder, layer: int) -> SandwichLayer:
    return _layer(builder, layer, has_qk_norm=False)


def _gemma3_layer(builder: Builder, layer: int) -> SandwichLayer:
    return _layer(builder, layer, has_qk_norm=True)


def _final_norm(builder: Builder) -> RMSNorm:
    return builder.rms_norm("norm", offset=_NORM_OFFSET)


def read_gemma2(fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """Scores and logits are capped, embeddings and queries scaled."""
    if fields["use_bidirectional_attention"]:
        raise ConfigError("config.json: use_bidirectional_attention true is not supported; write false")
    return replace(
        config,
        attention_scale=float(fields["query_pre_attn_scalar"]) ** -0.5,
        attention_softcap=float(fields["attn_logit_softcapping"] or 0.0),
        logit_softcap=float(fields["final_logit_softcapping"] or 0.0),
        embedding_scale=config.hidden_size**0.5,
    )


def read_gemma3(fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """Gemma 2 with norms of queries and keys in the place of caps of scores, and own ropes for local layers."""
    return replace(read_gemma2(fields, config), attention_softcap=0.0)


GEMMA2 = Architecture(_gemma2_layer, _final_norm)
GEMMA3 = Architecture(_gemma3_layer, _final_norm)
