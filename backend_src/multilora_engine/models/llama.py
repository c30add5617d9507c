"""Llama, and the families that differ from it by few numbers: Mistral, Qwen 2, Qwen 3, Granite, SmolLM3."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from multilora_engine.errors import ConfigError
from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.hf_config import WINDOWS, HFConfig, WindowedConfig
from multilora_engine.models.layers import Attention, GatedMLP, HeadNorm, PreNormLayer
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.norms import RMSNorm
from multilora_kernels import PackedLayer


class LlamaConfig(HFConfig):
    unread: ClassVar[tuple[str, ...]] = WINDOWS
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False

    def fill_in(self) -> None:
        self.check_heads()


class MistralConfig(HFConfig):
    knows_layer_types: ClassVar[bool] = True
    unread: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    max_position_embeddings: int = 4096 * 32
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = 4096


class Qwen2Config(WindowedConfig):
    unread: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6


class Qwen3Config(Qwen2Config):
    head_dim: int = 128
    attention_bias: bool = False


class GraniteConfig(HFConfig):
    unread: ClassVar[tuple[str, ...]] = WINDOWS
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0


class SmolLM3Config(HFConfig):
    knows_layer_types: ClassVar[bool] = True
    vocab_size: int = 128256
    hidden_size: int = 2048
    intermediate_size: int = 11008
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = 2_000_000.0
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4

    def fill_in(self) -> None:
        if self.no_rope_layers is None:
            if self.no_rope_layer_interval == 0:
                raise ConfigError("config.json: no_rope_layer_interval must not be 0")
            layers = range(1, self.num_hidden_layers + 1)
            self.no_rope_layers = [int(layer % self.no_rope_layer_interval != 0) for layer in layers]
        if len(self.no_rope_layers) != self.num_hidden_layers:
            raise ConfigError(
                f"config.json: no_rope_layers has {len(self.no_rope_layers)} items and num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        if self.layer_types is None:
            has_windows = self.use_sliding_window and self.sliding_window is not None
            kinds = {True: "full_attention", False: "sliding_attention" if has_windows else "full_attention"}
            self.layer_types = [kinds[bool(turns)] for turns in self.no_rope_layers]


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


def read_llama(_hf: HFConfig, config: ModelConfig) -> ModelConfig:
    """Nothing differs."""
    return config


def read_qwen2(_hf: Qwen2Config, config: ModelConfig) -> ModelConfig:
    """q, k and v always have biases, the output never."""
    return replace(config, qkv_bias=True, output_bias=False)


def read_granite(hf: GraniteConfig, config: ModelConfig) -> ModelConfig:
    """Embeddings, scores, updates and logits are scaled."""
    return replace(
        config,
        embedding_scale=hf.embedding_multiplier,
        attention_scale=hf.attention_multiplier,
        residual_scale=hf.residual_multiplier,
        logit_scale=1.0 / hf.logits_scaling,
    )


def read_smollm3(hf: SmolLM3Config, config: ModelConfig) -> ModelConfig:
    """Some layers have no rotary embeddings; despite its name, `no_rope_layers` has 1 for the others."""
    assert hf.no_rope_layers is not None, "filled in"
    ropes = tuple(rope if turns else None for rope, turns in zip(config.layer_ropes, hf.no_rope_layers, strict=True))
    return replace(config, layer_ropes=ropes)


LLAMA = Architecture(LlamaLayer)
QWEN3 = Architecture(_qwen3_layer)
