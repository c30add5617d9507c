"""Adapters as sources have them: folders with the files that PEFT saves, whose content is known."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save_file

from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.names import task_id_of
from multilora_engine.lora.sources.directory import DirectorySource
from multilora_engine.lora.sources.source import AdapterKey, LocalAdapter, NotThere
from support.adapters import TINY, wire_adapter
from support.fronts import TIMEOUT_S

ROWS = [(1, 0, 4), (6, 2, 16)]
MAX_BYTES = 1 << 20
NO_BASE = Path("/nowhere/base")
"""The base model's checkpoint, where no DoRA adapter needs one."""
_MODULES = {1: "self_attn.q_proj", 6: "mlp.down_proj"}


def key(name: str) -> AdapterKey:
    """What a request by a name asks for."""
    return AdapterKey(task_id_of(name), name)


def digest_of(seed: int) -> str:
    """The digest that `save_adapter(..., seed)` has when a client uploads it."""
    wire = wire_adapter(TINY, ROWS, seed=seed)
    return pack_adapter(wire.weights, wire.config, TINY).digest


def save_adapter(directory: Path, seed: int, **config: Any) -> Path:
    """Write a PEFT adapter for the layout TINY."""
    directory.mkdir(parents=True)
    tensors = {}
    for (module_id, layer), (a, b) in wire_adapter(TINY, ROWS, seed=seed).matrices.items():
        prefix = f"base_model.model.model.layers.{layer}.{_MODULES[module_id]}"
        tensors |= {f"{prefix}.lora_A.weight": a.contiguous(), f"{prefix}.lora_B.weight": b.contiguous()}
    sound = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "rank_pattern": {"down_proj": 16}}
    sound["alpha_pattern"] = {"down_proj": 16}
    (directory / "adapter_config.json").write_text(json.dumps(sound | config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


class GivenSource:
    """A source that has the folders it is given; and an example of a plug-in."""

    def __init__(self, folders: dict[str, Path] | None = None) -> None:
        self.folders = folders or {}
        self.asked: list[str] = []

    @contextmanager
    def open(self, key: AdapterKey, max_bytes: int) -> Iterator[LocalAdapter]:
        self.asked.append(str(key))
        if str(key) not in self.folders:
            raise NotThere("not among the given ones")
        folder = self.folders[str(key)]
        yield LocalAdapter(folder, folder, revision="1", name=key.name)

    def list_keys(self) -> Iterator[AdapterKey]:
        return map(key, self.folders)


class GatedSource(DirectorySource):
    """A directory's adapters, once the gate is open. asked: what it was asked for, in order."""

    gate = threading.Event()
    asked: ClassVar[list[str]] = []

    def open(self, key: AdapterKey, max_bytes: int) -> AbstractContextManager[LocalAdapter]:
        self.asked.append(str(key))
        assert self.gate.wait(TIMEOUT_S)
        return super().open(key, max_bytes)
