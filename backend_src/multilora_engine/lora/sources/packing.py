"""Packs the adapter of a directory, with the client's own converter and the checks that uploads go through."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from multilora_client.adapter import AdapterTensors
from multilora_client.base_weights import read_header
from multilora_client.convert import convert_peft
from multilora_client.errors import AdapterError
from multilora_client.peft_directory import check_peft_directory
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.format import check_rank, pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.preload import read_folder
from multilora_engine.lora.sources.source import PEFT_FILES, LocalAdapter, Unusable, choose_files
from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.converted_files import BrokenFiles
from multilora_wire.layout import AdapterLayout, num_values

_HEADER_ALLOWANCE = 16 << 20
"""Bytes of headers and of the configuration beside the weights."""

_TENSORS_PER_ROW = 3
"""A, B and, for DoRA, the magnitude."""

_MAX_CONFIG_BYTES = 256 << 10
"""Parsing JSON keeps the interpreter from the steps: 3 ms for so much."""

_HEADER_BYTES_PER_TENSOR = 512
"""Of a header of safetensors, which is JSON, too, and has notes of the trainer's beside the tensors."""

_PLAIN_PATTERN = re.compile(r"[\w.|^$\\-]{0,1000}", re.ASCII)
"""Names of modules, alternatives, anchors and escapes: no expression of these takes long to match."""


def largest_adapter_bytes(layout: AdapterLayout) -> int:
    """The most bytes that the files of a legal adapter have: every row as wide as the widest, in float32."""
    widest = max(num_values(module, layout.max_rank, is_dora=True) for module in layout.sites.modules)
    return layout.sites.num_columns * widest * 4 + _HEADER_ALLOWANCE


def pack_directory(adapter: LocalAdapter, layout: AdapterLayout, base_model: Path) -> PackedAdapter:
    """Read, check and pack. base_model: the checkpoint, which DoRA's magnitudes refer to. Raises Unusable."""
    try:
        if choose_files(os.listdir(adapter.directory)) != PEFT_FILES:
            return read_folder(adapter.directory, adapter.root, layout, base_model.name)
        _check_lengths(adapter.directory / PEFT_FILES[0], adapter.directory / PEFT_FILES[1], layout)
        _check_patterns(adapter.directory / PEFT_FILES[0], layout)
        shapes = _read_shapes(adapter.directory / PEFT_FILES[1], layout)
        check_peft_directory(adapter.directory, layout.sites, base_model.name)
        _check_ranks(shapes, layout)
        tensors = convert_peft(adapter.directory, base_model=base_model, sites=layout.sites)
        return pack_adapter(_weights(tensors), torch.from_numpy(tensors.config), layout)
    except (AdapterError, BrokenFiles, WrongBaseModel, InvalidRequest, OSError, ValueError) as error:
        # The converter names files by their whole paths, which only the operator may see.
        text = str(error).replace(f"{adapter.directory}/", "").replace(str(base_model), "the base model")
        raise Unusable(text) from error


def _weights(tensors: AdapterTensors) -> torch.Tensor:
    if tensors.dtype == "BF16":
        return torch.from_numpy(tensors.weights.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(tensors.weights)


def _read_shapes(path: Path, layout: AdapterLayout) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's tensors. Raises Unusable for more tensors than any adapter of this model has."""
    shapes = {key: tensor.shape for key, (tensor, _) in read_header(path).items()}
    if len(shapes) > (limit := _TENSORS_PER_ROW * layout.sites.num_columns):
        raise Unusable(f"{path.name} has {len(shapes)} tensors, an adapter of this model has {limit} at most")
    return shapes


def _check_ranks(shapes: Mapping[str, tuple[int, ...]], layout: AdapterLayout) -> None:
    """Check ranks before rows are laid out, all as wide as the widest: one of a huge rank could fill the memory.

    The other sides of the matrices are the model's by now. Raises InvalidRequest.
    """
    for key, shape in shapes.items():
        if key.endswith((".lora_A.weight", ".lora_B.weight")):
            check_rank(key, shape[0 if ".lora_A." in key else 1], layout)


def _check_lengths(config: Path, weights: Path, layout: AdapterLayout) -> None:
    """Check the lengths of the two texts that are parsed with the interpreter's lock held."""
    if (num_bytes := config.stat().st_size) > _MAX_CONFIG_BYTES:
        raise Unusable(f"{config.name} has {num_bytes} bytes, at most {_MAX_CONFIG_BYTES} are read")
    with weights.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
    if num_bytes > (
        limit := _HEADER_BYTES_PER_TENSOR * _TENSORS_PER_ROW * layout.sites.num_columns + _MAX_CONFIG_BYTES
    ):
        raise Unusable(f"the header of {weights.name} has {num_bytes} bytes, of this model's adapters {limit} at most")


def _check_patterns(path: Path, layout: AdapterLayout) -> None:
    """Patterns are regular expressions from the maker of the adapter, and matching one can take for ever."""
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path.name} is not JSON: {error}") from error
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(field) if isinstance(config, dict) else None
        if patterns is not None and not isinstance(patterns, dict):
            raise Unusable(f"{path.name}: {field} is {type(patterns).__name__}, an object is expected")
        if patterns and len(patterns) > (limit := 2 * layout.sites.num_columns):
            raise Unusable(
                f"{path.name}: {field} has {len(patterns)} entries, an adapter of this model {limit} at most"
            )
        for pattern in patterns or ():
            if _PLAIN_PATTERN.fullmatch(pattern) is None:
                raise Unusable(
                    f"{path.name}: {field} has the expression {pattern[:100]!r}; from a source only names of modules, "
                    "alternatives (|) and anchors are taken. Convert the adapter first (multilora convert)"
                )
