"""PEFT directories with parts outside the layers, packed as a server packs them."""

from __future__ import annotations

from pathlib import Path

from multilora_engine.lora.format import pack_peft
from multilora_engine.lora.layout import PackedAdapter
from multilora_wire.layout import AdapterLayout
from multilora_wire.peft_files import open_peft_directory


def packed_files(directory: Path, layout: AdapterLayout, base_model: Path) -> PackedAdapter:
    """The adapter of a PEFT directory. base_model: the checkpoint that is served."""
    with open_peft_directory(directory, layout.sites, base_model.name) as adapter:
        return pack_peft(adapter, layout, base_model)
