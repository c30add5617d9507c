"""Gemma 2 (arXiv:2408.00118) and the text models of Gemma 3 (arXiv:2503.19786).

Norms stand on both sides of attention and MLP; their weights are stored less one. Local layers attend to a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from multilora_engine.errors import ConfigError
from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.hf_config import HFConfig, with_rope_type
from multilora_engine.models.layers import Attention, GatedMLP, SandwichLayer
from multilora_engine.models.llama import head_norm
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.norms import RMSNorm

_NORM_OFFSET = 1.0


class Gemma2Config(HFConfig):
    knows_layer_types: ClassVar[bool] = True
    unread: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    activation_field: ClassVar[str] = "hidden_activation"
    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 8192
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window: int | None = 4096
    query_pre_attn_scalar: int = 256
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0
    use_bidirectional_attention: bool | None = None

    def fill_in(self) -> None:
        self.check_heads()
        if self.layer_types is None:
            self.layer_types = self.alternate_windows(2)


class Gemma3Config(Gemma2Config):
    vocab_size: int = 262_208
    max_position_embeddings: int = 131_072
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False
    rope_theta: float | None = 1_000_000.0
    rope_local_base_freq: float | None = 10_000.0
    sliding_window_pattern: int = 6

    def fill_in(self) -> None:
        self.check_heads()
        if self.layer_types is None:
            self.layer_types = self.alternate_windows(self.sliding_window_pattern)

    def complete_rope(self) -> dict[str, Any]:
        """Global and local layers have rotary embeddings of their own; `rope_scaling` is of global ones."""
        default = {"rope_type": "default"}
        unsaid = {"full_attention": default, "sliding_attention": default}
        parameters = dict(unsaid if self.rope_parameters is None else self.rope_parameters)
        scaling = {"full_attention": self.rope_scaling or {}}
        thetas = {"full_attention": self.rope_theta, "sliding_attention": self.rope_local_base_freq}
        for kind, theta in thetas.items():
            own = parameters.get(kind) or {}
            if not isinstance(own, dict):
                raise ConfigError(f"config.json: rope_parameters of {kind} must be an object, got {own!r}")
            own = {"rope_theta": theta} | own | scaling.get(kind, {})
            parameters[kind] = with_rope_type(own, self.max_position_embeddings)
        return parameters


def _layer(builder: Builder, layer: int, has_qk_norm: bool) -> SandwichLayer:
    def norms(first: str, second: str) -> tuple[RMSNorm, RMSNorm]:
        return builder.rms_norm(first, offset=_NORM_OFFSET), builder.rms_norm(second, offset=_NORM_OFFSET)

    return SandwichLayer(
        Attention(builder, layer, head_norm(builder, _NORM_OFFSET) if has_qk_norm else None),
        GatedMLP(builder),
        before=norms("input_layernorm", "pre_feedforward_layernorm"),
        behind=norms("post_attention_layernorm", "post_feedforward_layernorm"),
    )


def _gemma2_layer(builder: Builder, layer: int) -> SandwichLayer:
    return _layer(builder, layer, has_qk_norm=False)


def _gemma3_layer(builder: Builder, layer: int) -> SandwichLayer:
    return _layer(builder, layer, has_qk_norm=True)


def _final_norm(builder: Builder) -> RMSNorm:
    return builder.rms_norm("norm", offset=_NORM_OFFSET)


def read_gemma2(hf: Gemma2Config, config: ModelConfig) -> ModelConfig:
    """Scores and logits are capped, embeddings and queries scaled."""
    if hf.use_bidirectional_attention:
        raise ConfigError("config.json: use_bidirectional_attention true is not supported; write false")
    return replace(
        config,
        attention_scale=float(hf.query_pre_attn_scalar) ** -0.5,
        attention_softcap=float(hf.attn_logit_softcapping or 0.0),
        logit_softcap=float(hf.final_logit_softcapping or 0.0),
        embedding_scale=config.hidden_size**0.5,
    )


def read_gemma3(hf: Gemma3Config, config: ModelConfig) -> ModelConfig:
    """Gemma 2 with norms of queries and keys in the place of caps of scores, and own ropes for local layers."""
    return replace(read_gemma2(hf, config), attention_softcap=0.0)


GEMMA2 = Architecture(_gemma2_layer, _final_norm)
GEMMA3 = Architecture(_gemma3_layer, _final_norm)
