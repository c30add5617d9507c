"""Phi-3 (arXiv:2404.14219) and Phi-4: Llama's layers; checkpoints store q, k, v as one linear, and gate, up."""

from __future__ import annotations

from typing import Any

from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.llama import LlamaLayer
from multilora_engine.models.model_config import ModelConfig


def _layer(builder: Builder, layer: int) -> LlamaLayer:
    return LlamaLayer(builder, layer, stored_qkv="self_attn.qkv_proj", stored_gate_up="mlp.gate_up_proj")


def read(_hf: Any, config: ModelConfig) -> ModelConfig:
    """Nothing differs; heads may turn in part, and rotary embeddings are `longrope` in models of long contexts."""
    return config


PHI3 = Architecture(_layer)
