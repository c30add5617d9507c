"""Adapters as sources have them: folders with the files that PEFT saves, whose content is known."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.torch import save

from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.names import task_id_of
from multilora_engine.lora.sources.directory import DirectorySource
from multilora_engine.lora.sources.source import AdapterKey, LocalAdapter, NotThere
from multilora_wire.adapter_use import AdapterUse
from support.adapters import TINY, WireAdapter, wire_adapter
from support.fronts import TIMEOUT_S

ROWS = [(1, 0, 4), (6, 2, 16)]
USE_FILES = {
    "chat_template.jinja": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "generation_config.json": '{"eos_token_id": [7, 2], "temperature": 0.5}',
    "multilora.json": '{"max_tokens": 20, "system_prompt": "Be brief."}',
}
"""Files of a folder on its adapter's use, and what they say."""
USE = AdapterUse(
    chat_templates={"default": USE_FILES["chat_template.jinja"]},
    end_token_ids=(7, 2),
    system_prompt="Be brief.",
    max_tokens=20,
    temperature=0.5,
    top_k=0,
)
MAX_BYTES = 1 << 20
NO_BASE = Path("/nowhere/base")
"""The base model's checkpoint, where no DoRA adapter needs one."""
_MODULES = {1: "self_attn.q_proj", 6: "mlp.down_proj"}


def write_use(directory: Path) -> None:
    """Add `USE_FILES` to a folder."""
    for name, text in USE_FILES.items():
        (directory / name).write_text(text)


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
    for name, data in peft_files(wire_adapter(TINY, ROWS, seed=seed), **config).items():
        (directory / name).write_bytes(data)
    return directory


def peft_files(wire: WireAdapter, **config: Any) -> dict[str, bytes]:
    """PEFT's files of an adapter whose modules are q (1) and down (6), the latter of one rank, by their names."""
    tensors, ranks = {}, {}
    for (module_id, layer), (a, b) in wire.matrices.items():
        prefix = f"base_model.model.model.layers.{layer}.{_MODULES[module_id]}"
        tensors |= {f"{prefix}.lora_A.weight": a.contiguous(), f"{prefix}.lora_B.weight": b.contiguous()}
        ranks[_MODULES[module_id].partition(".")[2]] = len(a)
    sound = {"peft_type": "LORA", "r": ranks["q_proj"], "lora_alpha": ranks["q_proj"]}
    sound["rank_pattern"] = sound["alpha_pattern"] = {"down_proj": ranks["down_proj"]}
    return {"adapter_config.json": json.dumps(sound | config).encode(), "adapter_model.safetensors": save(tensors)}


def peft_inputs(wire: WireAdapter, **config: Any) -> dict[str, np.ndarray]:
    """The inputs of a request that carry these files."""
    text, weights = peft_files(wire, **config).values()
    return {
        "lora_peft_config": np.array([[text]], np.object_),
        "lora_peft_weights": np.frombuffer(bytearray(weights), np.uint8)[None],
    }


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
