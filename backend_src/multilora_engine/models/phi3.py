"""Phi-3 (arXiv:2404.14219) and Phi-4: Llama's layers; checkpoints store q, k, v as one linear, and gate, up."""

from __future__ import annotations

from typing import Any, ClassVar

from multilora_engine.errors import ConfigError
from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.hf_config import HFConfig
from multilora_engine.models.llama import LlamaLayer
from multilora_engine.models.model_config import ModelConfig


class Phi3Config(HFConfig):
    unread: ClassVar[tuple[str, ...]] = ("layer_types", "attention_bias", "mlp_bias")
    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 1.0

    def complete_rope(self) -> dict[str, Any]:
        """Every scaling is `longrope`, under any name in the file."""
        parameters = super().complete_rope()
        kind = parameters["rope_type"]
        if kind == "default":
            return parameters
        if kind not in ("default", "longrope", "su", "yarn"):
            raise ConfigError(
                f"config.json: rope_type {kind!r} is not supported for phi3; supported are: default, longrope"
            )
        return self._with_original_length(parameters | {"rope_type": "longrope"})


def _layer(builder: Builder, layer: int) -> LlamaLayer:
    return LlamaLayer(builder, layer, stored_qkv="self_attn.qkv_proj", stored_gate_up="mlp.gate_up_proj")


def read(_hf: Phi3Config, config: ModelConfig) -> ModelConfig:
    """Nothing differs; heads may turn in part, and rotary embeddings are `longrope` in models of long contexts."""
    return config


PHI3 = Architecture(_layer)
