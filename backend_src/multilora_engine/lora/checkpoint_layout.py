"""The layout of a checkpoint's adapters, without its weights."""

from __future__ import annotations

from pathlib import Path

from multilora_engine.models.quantization.format import sites_ruled_out
from multilora_engine.models.registry import read_model_config
from multilora_wire.layout import AdapterLayout, adapter_layout


def checkpoint_layout(checkpoint: Path, max_rank: int, lora_dtype: str) -> AdapterLayout:
    """The layout that an engine serving `checkpoint` has. Raises ConfigError."""
    sites = read_model_config(checkpoint, "auto").sites
    return adapter_layout(sites, max_rank, lora_dtype, sites_ruled_out(checkpoint, sites))
