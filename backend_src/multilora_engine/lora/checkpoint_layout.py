"""The layout of a checkpoint's adapters, without its weights."""

from __future__ import annotations

from pathlib import Path

from multilora_engine.models.model_config import ModelConfig, read_model_config
from multilora_wire.layout import AdapterLayout, adapter_layout
from multilora_wire.sites import ModelSites, decoder_sites


def checkpoint_layout(checkpoint: Path, max_rank: int, lora_dtype: str) -> AdapterLayout:
    """The layout that an engine serving `checkpoint` has. Raises ConfigError."""
    return adapter_layout(model_sites(read_model_config(checkpoint)), max_rank, lora_dtype)


def model_sites(model: ModelConfig) -> ModelSites:
    """The sites of a model whose decoder layers are Llama's."""
    return decoder_sites(model.num_layers, model.hidden_size, model.q_size, model.kv_size, model.intermediate_size)
