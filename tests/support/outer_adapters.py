"""PEFT directories with parts outside the layers, packed by hand: the matrices as PEFT documents them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from multilora_client.convert import convert_peft
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_wire.layout import AdapterLayout
from multilora_wire.sites import EMBEDDING_LORA, EMBEDDING_ROWS, HEAD_LORA, HEAD_ROWS, TIED_ROWS
from support.outer_parts import OuterPart, add_parts

_OUTER_FIELDS = {"trainable_token_indices": None, "modules_to_save": None, "target_modules": None}


def outer_packed(directory: Path, layout: AdapterLayout, base: dict[str, torch.Tensor]) -> PackedAdapter:
    """The adapter of a PEFT directory. base: the weights of its model."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    linears = {key: tensor for key, tensor in tensors.items() if ".layers." in key}
    outer = {key.removeprefix("base_model.model."): tensors[key] for key in tensors if key not in linears}
    packed = None
    if linears:
        converted = _converted(directory, config, linears, base)
        packed = pack_adapter(torch.from_numpy(converted.weights), torch.from_numpy(converted.config), layout)
    parts = _parts(outer, config, layout, base)
    return add_parts(packed, parts, layout) if parts or packed is None else packed


def _converted(
    directory: Path, config: dict[str, Any], linears: dict[str, torch.Tensor], base: dict[str, torch.Tensor]
) -> Any:
    folder = directory.parent / f"{directory.name} linears"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config | _OUTER_FIELDS))
    save_file(linears, folder / "adapter_model.safetensors")
    save_file({key: tensor.clone().contiguous() for key, tensor in base.items()}, folder / "model.safetensors")
    return convert_peft(folder, "float32", base_model=folder)


def _parts(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], layout: AdapterLayout, base: dict[str, torch.Tensor]
) -> list[OuterPart]:
    assert layout.sites.outer is not None
    embeddings = base["model.embed_tokens.weight"]
    head = base.get("lm_head.weight", embeddings)
    parts = []
    scaling = config.get("lora_alpha", 1) / config.get("r", 1)
    if (a := tensors.get("model.embed_tokens.lora_embedding_A")) is not None:
        parts.append(OuterPart(EMBEDDING_LORA, a, tensors["model.embed_tokens.lora_embedding_B"] * scaling))
    if (a := tensors.get("lm_head.lora_A.weight")) is not None:
        b, magnitude = tensors["lm_head.lora_B.weight"] * scaling, tensors.get("lm_head.lora_magnitude_vector")
        if magnitude is not None:
            magnitude = magnitude / (head + b @ a).norm(dim=1)
        parts.append(OuterPart(HEAD_LORA, a, b, magnitude))
    for name, module_id, weight in (("model.embed_tokens", EMBEDDING_ROWS, embeddings), ("lm_head", HEAD_ROWS, head)):
        saved = tensors.get(f"{name}.weight", tensors.get(f"{name}.base_layer.weight"))
        if saved is not None and (changed := (saved != weight).any(dim=1).nonzero().flatten()).numel():
            parts.append(OuterPart(module_id, changed, saved[changed]))
        delta = tensors.get(
            f"{name}.token_adapter.trainable_tokens_delta", tensors.get(f"{name}.trainable_tokens_delta")
        )
        if delta is not None:
            indices = config.get("trainable_token_indices") or config["token_indices"]
            if isinstance(indices, dict):
                indices = indices[name.rpartition(".")[2]]
            elif layout.sites.outer.is_tied:
                module_id = TIED_ROWS
            parts.append(OuterPart(module_id, torch.tensor(indices), delta))
    # Of tied modules PEFT may save both.
    return list({part.module_id: part for part in parts}.values())
