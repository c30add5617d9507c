"""Packs the adapter of a directory, with the checks that uploads go through."""

from __future__ import annotations

import os
from pathlib import Path

from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.folder_use import UseReader
from multilora_engine.lora.format import pack_peft
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.preload import read_folder
from multilora_engine.lora.sources.source import GGUF_ENDING, PEFT_FILES, LocalAdapter, Unusable, choose_files
from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.converted_files import BrokenFiles
from multilora_wire.gguf.adapter import read_gguf_adapter
from multilora_wire.layout import AdapterLayout, num_values
from multilora_wire.peft_config import PeftError
from multilora_wire.peft_files import PeftAdapter, open_peft_directory
from multilora_wire.tensor_file import FileBytes

_HEADER_ALLOWANCE = 16 << 20
"""Bytes of headers and of the configuration beside the weights."""


def largest_adapter_bytes(layout: AdapterLayout) -> int:
    """The most bytes that the files of a legal adapter have, in float32: the rows of all modules, each but those of
    experts as wide as the widest; LoRA on embeddings and head, a copy of each, and rows of all tokens.
    """
    sites = layout.sites
    plain = [num_values(module, layout.max_rank, is_dora=True) for module in sites.plain_modules if module.experts == 1]
    experts = [num_values(module, layout.max_rank) for module in sites.plain_modules if module.experts > 1]
    fused = [num_values(module, layout.max_rank, is_dora=True) for module in sites.modules if len(module.parts) > 1]
    matrices = [num_values(m, layout.max_rank, is_dora=True) for m in sites.outer_modules if m.kind != "rows"]
    copies = [2 * m.in_size * m.out_size for m in (sites.outer.modules if sites.outer else ()) if m.kind != "rows"]
    num_rows = len(plain) * max([*plain, *fused], default=0)
    return (num_rows + sum(experts) + sum(matrices) + sum(copies)) * 4 + _HEADER_ALLOWANCE


def pack_directory(
    adapter: LocalAdapter, layout: AdapterLayout, base_model: Path, uses: UseReader | None = None
) -> PackedAdapter:
    """Read, check and pack. base_model: the checkpoint, which DoRA's magnitudes refer to. Raises Unusable.

    uses: reads what the folder says about the adapter's use; None where no chats are answered.
    """
    try:
        files = choose_files(os.listdir(adapter.directory))

        def use_of(peft: PeftAdapter | None = None) -> str:
            has_rows = peft is not None and bool(peft.rows)
            return "" if uses is None else uses.read_folder(adapter.directory, adapter.root, has_rows)

        if files[0].endswith(GGUF_ENDING):
            with FileBytes(adapter.directory / files[0]) as source:
                return pack_peft(read_gguf_adapter(source, base_model, layout.sites), layout, base_model, use_of())
        if files != PEFT_FILES:
            return read_folder(adapter.directory, adapter.root, layout, base_model.name, use_of())
        with open_peft_directory(adapter.directory, layout.sites, base_model.name) as peft:
            return pack_peft(peft, layout, base_model, use_of(peft))
    except (PeftError, BrokenFiles, WrongBaseModel, InvalidRequest, OSError, ValueError) as error:
        # Errors of files name their whole paths, which only the operator may see.
        text = str(error).replace(f"{adapter.directory}/", "").replace(str(base_model), "the base model")
        raise Unusable(text) from error
