"""`Checkpoint`: the files of a checkpoint directory's weights, safetensors or GGUF, and their headers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from multilora_engine.errors import ConfigError
from multilora_engine.models.gguf_weights import GGUFWeights
from multilora_wire.checkpoint_directory import gguf_links, is_gguf, only_gguf
from multilora_wire.quantized.scheme import StoredTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PAGES = 256
"""Of a file, that its fingerprint is made of."""
_PAGE_BYTES = 4096


class Checkpoint:
    """files: the one file, or those the index names, in order. tensors: the headers' entries, by name."""

    def __init__(self, path: Path) -> None:
        """Reads the headers. Raises ConfigError where files are missing, damaged, or of another format."""
        self.path = path
        self.files = checkpoint_files(path)
        self._gguf = GGUFWeights(path) if is_gguf(path) else None
        self._readers: dict[Path, Any] = {}
        self._opened = contextlib.ExitStack()
        self._file_of: dict[str, Path] = {}
        self.tensors: dict[str, StoredTensor] = {}
        if self._gguf is not None:
            self.tensors = self._gguf.tensors
            return
        for file in self.files:
            with opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    view = tensors.get_slice(name)
                    self.tensors[name] = StoredTensor(view.get_dtype(), tuple(view.get_shape()))
                    self._file_of[name] = file

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, read out of its turn. Its file stays open until `close`: to open it takes its whole header."""
        if self._gguf is not None:
            return self._gguf.tensor(name)
        file = self._file_of[name]
        if file not in self._readers:
            self._readers[file] = self._opened.enter_context(opened(file))
        found: torch.Tensor = self._readers[file].get_tensor(name)
        return found

    def close(self) -> None:
        """Close the files that `tensor` opened."""
        self._readers.clear()
        self._opened.close()

    def read(self) -> Iterator[tuple[str, torch.Tensor, Path]]:
        """All tensors with their files, one at a time. A file may have a tensor that another has, too."""
        if self._gguf is not None:
            for name in self.tensors:
                yield name, self._gguf.tensor(name), self._gguf.file_of(name)
            return
        for file in self.files:
            with opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    yield name, tensors.get_tensor(name), file


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """An open safetensors file. Raises ConfigError, which names it, where it cannot be read."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        # safetensors says of a file that may not be read that there is none.
        may_read = not file.exists() or os.access(file, os.R_OK)
        reason = error if may_read else f"this process's user may not read it; chmod -R a+rX {file.parent}"
        raise ConfigError(f"cannot read {file}: {reason}") from error


def checkpoint_files(path: Path) -> list[Path]:
    """A checkpoint's files of weights: one file, or all files that the index names, in order. Raises ConfigError."""
    if is_gguf(path):
        return gguf_links(path)
    if (path / SINGLE_FILE).is_file():  # transformers takes it, too, where an older index lies beside it
        return [path / SINGLE_FILE]
    if (path / INDEX_FILE).is_file():
        return _indexed_files(path)
    if advice := only_gguf(path):
        raise ConfigError(f"{path} has no {SINGLE_FILE}: {advice}")
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(path.glob(pattern))]
    reason = f"it has only {', '.join(pickles)}, and pickle files can run code" if pickles else "it has neither"
    raise ConfigError(
        f"{path} needs {SINGLE_FILE} or {INDEX_FILE}: {reason}. "
        "Save it again with transformers: model.save_pretrained(directory)"
    )


def weights_fingerprint(path: Path) -> str:
    """64 hex digits that tell checkpoints apart by their weights, without reading them whole. Raises ConfigError.

    Of the files' sizes and of 256 pages at even distances in each. Training changes numbers all over the tensors that
    it changes: only weights that differ in less than 1/256 of a file, and nowhere else, may have the same digits.
    """
    digest = hashlib.sha256()
    for name in checkpoint_files(path):
        try:
            with name.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                digest.update(num_bytes.to_bytes(8, "little"))
                for page in range(_PAGES):
                    file.seek(page * num_bytes // _PAGES)
                    digest.update(file.read(_PAGE_BYTES))
        except OSError as error:
            raise ConfigError(f"cannot read {name}: {error}") from error
    return digest.hexdigest()


def _indexed_files(path: Path) -> list[Path]:
    index = path / INDEX_FILE
    try:
        names = dict.fromkeys(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read {index}: it needs a weight_map of tensor names to file names") from error
    if not names:
        raise ConfigError(f"{index}: its weight_map is empty")
    return [path / _plain_file_name(index, name) for name in names]


def _plain_file_name(index: Path, name: object) -> str:
    if isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors"):
        return name
    raise ConfigError(f"{index}: {name!r} must be the name of a .safetensors file in the same directory")
