"""Phi-3 (arXiv:2404.14219) and Phi-4: Llama's layers; checkpoints store q, k, v as one linear, and gate, up."""

from __future__ import annotations

from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.llama import LlamaLayer


def _layer(builder: Builder, layer: int) -> LlamaLayer:
    return LlamaLayer(builder, layer, stored_qkv="self_attn.qkv_proj", stored_gate_up="mlp.gate_up_proj")


PHI3 = Architecture(_layer)
