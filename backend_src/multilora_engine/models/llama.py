"""Llama, and the families that differ from it by few numbers: Mistral, Qwen 2, Qwen 3, Granite, SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from multilora_engine.errors import ConfigError
from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.layers import Attention, GatedMLP, HeadNorm, PreNormLayer
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.norms import RMSNorm
from multilora_kernels import PackedLayer


class LlamaLayer(PreNormLayer):
    """The usual layer; a CPU computes all of them in one call, where nothing in them is unusual."""

    mlp: GatedMLP
    attention_norm: RMSNorm
    mlp_norm: RMSNorm

    def __init__(
        self, builder: Builder, layer: int, has_qk_norm: bool = False, stored_qkv: str = "", stored_gate_up: str = ""
    ) -> None:
        """stored_qkv, stored_gate_up: paths of the linears that the checkpoint has in place of q, k, v and gate, up."""
        attention, mlp = Attention(builder, layer, stored_as=stored_qkv), GatedMLP(builder, stored_gate_up)
        norms = builder.rms_norm("input_layernorm"), builder.rms_norm("post_attention_layernorm")
        super().__init__(builder, attention, mlp, norms)
        if has_qk_norm:
            attention.qk_norm = head_norm(builder)
        self._is_usual = not has_qk_norm and _is_usual(builder.config, layer)

    def packed(self) -> PackedLayer | None:
        if not self._is_usual:
            return None
        qkv, o = self.attention.qkv.packed(), self.attention.o.packed()
        gate_up, down = self.mlp.gate_up.packed(), self.mlp.down.packed()
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        norms = (self.attention_norm, self.mlp_norm)
        return PackedLayer(norms[0].weight, qkv, o, norms[1].weight, gate_up, down, norms[0].eps)


def _is_usual(config: ModelConfig, layer: int) -> bool:
    """Whether `decoder_layers` computes exactly this."""
    rope = config.layer_ropes[layer]
    if rope is None or config.ropes[rope].rotary_dim != config.head_dim or config.ropes[rope].is_interleaved:
        return False
    return config.residual_scale == 1.0 and config.attention_softcap == 0.0 and config.activation == "silu"


def head_norm(builder: Builder, offset: float = 0.0) -> HeadNorm:
    """Norms of each head of queries and keys."""
    head_dim = builder.config.head_dim
    q, k = (builder.rms_norm(f"self_attn.{name}_norm", head_dim, offset) for name in ("q", "k"))
    return HeadNorm(q, k, head_dim)


def _qwen3_layer(builder: Builder, layer: int) -> LlamaLayer:
    return LlamaLayer(builder, layer, has_qk_norm=True)


def read_qwen2(_fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """q, k and v always have biases, the output never."""
    return replace(config, qkv_bias=True, output_bias=False)


def read_granite(fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """Embeddings, scores, updates and logits are scaled."""
    return replace(
        config,
        embedding_scale=fields["embedding_multiplier"],
        attention_scale=fields["attention_multiplier"],
        residual_scale=fields["residual_multiplier"],
        logit_scale=1.0 / fields["logits_scaling"],
    )


def read_smollm3(fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """Some layers have no rotary embeddings; despite its name, `no_rope_layers` has 1 for the others."""
    turning = fields["no_rope_layers"]
    if len(turning) != config.num_layers:
        raise ConfigError(
            f"config.json: no_rope_layers has {len(turning)} items and num_hidden_layers is {config.num_layers}"
        )
    ropes = tuple(rope if turns else None for rope, turns in zip(config.layer_ropes, turning, strict=True))
    return replace(config, layer_ropes=ropes)


LLAMA = Architecture(LlamaLayer)
QWEN3 = Architecture(_qwen3_layer)
