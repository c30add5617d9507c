"""Load a Hugging Face checkpoint directory. Only safetensors: they hold numbers and nothing that could run."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from multilora_engine.errors import ConfigError
from multilora_engine.models.model import Model
from multilora_engine.models.registry import build_model, read_model_config
from multilora_engine.models.weights import Destination, Placement

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ROTARY_BUFFER = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
"""Stored by old versions of transformers; it follows from config.json."""


def load_model(path: Path, placement: Placement, on_progress: Callable[[int, int], None] | None = None) -> Model:
    """Read the checkpoint in the directory `path` tensor by tensor into a model that lies as `placement` says.

    `on_progress` is called with (tensors loaded, tensors in all). Raises ConfigError, which names the tensor, when one
    is missing, unexpected, stored twice, of another shape, or not of a float type.
    """
    model = build_model(read_model_config(path), placement)
    loading = _Loading(model, on_progress)
    for file in checkpoint_files(path):
        loading.read_file(file)
    loading.finish(path)
    return model


def stored_dtype(path: Path) -> torch.dtype:
    """The type that holds every weight of the checkpoint as it is: that of its matrices, at most float32.

    It is read from the files: the one that config.json names is only what somebody once computed in.
    """
    stored = {name for file in checkpoint_files(path) for name in _matrix_dtypes(file)}
    dtypes = [dtype for name, dtype in _SAFETENSORS_DTYPES.items() if name in stored]
    widest = functools.reduce(torch.promote_types, dtypes, dtypes[0]) if dtypes else torch.float32
    return torch.float32 if widest == torch.float64 else widest


def _matrix_dtypes(file: Path) -> set[str]:
    with opened(file) as tensors:
        matrices = [view for name in tensors.keys() if len((view := tensors.get_slice(name)).get_shape()) == 2]  # noqa: SIM118
        return {view.get_dtype() for view in matrices}


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file's tensors, as safetensors gives them, on the CPU. Raises ConfigError."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


class _Loading:
    """The progress of one load: `_waiting` holds the places that have not been filled yet."""

    def __init__(self, model: Model, on_progress: Callable[[int, int], None] | None) -> None:
        self._waiting = model.checkpoint_tensors()
        self._expected = frozenset(self._waiting)
        self._on_progress = on_progress
        self._embeddings = model.embedding_rows()
        self._tied_head: torch.Tensor | None = None
        self._is_tied = model.config.tie_word_embeddings

    def read_file(self, file: Path) -> None:
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                self._take(name, tensors.get_tensor(name), file)

    def finish(self, path: Path) -> None:
        if self._waiting:
            names = ", ".join(sorted(self._waiting)[:5])
            raise ConfigError(f"{path}: {len(self._waiting)} tensors are missing from the checkpoint: {names}")
        if self._tied_head is not None and not self._is_embedding(self._tied_head):
            raise ConfigError(
                f"{path}: lm_head.weight differs from model.embed_tokens.weight although config.json says "
                "tie_word_embeddings; write false there to use it"
            )

    def _is_embedding(self, head: torch.Tensor) -> bool:
        embeddings = self._embeddings.tensor()
        return torch.equal(head.to(embeddings), embeddings)

    def _take(self, name: str, tensor: torch.Tensor, file: Path) -> None:
        if _ROTARY_BUFFER.fullmatch(name):
            return
        if name == "lm_head.weight" and self._is_tied:
            self._tied_head = tensor
            return
        place = self._claim(name, file)
        _check_tensor(name, tensor, place, file)
        place.copy_(tensor)
        if self._on_progress is not None:
            self._on_progress(len(self._expected) - len(self._waiting), len(self._expected))

    def _claim(self, name: str, file: Path) -> Destination:
        if name not in self._expected:
            raise ConfigError(f"{file}: unexpected tensor {name}: config.json describes a model without it")
        if name not in self._waiting:
            raise ConfigError(f"{file}: tensor {name} is stored twice in this checkpoint")
        return self._waiting.pop(name)


def _check_tensor(name: str, tensor: torch.Tensor, place: Destination, file: Path) -> None:
    if tensor.shape != place.shape:
        raise ConfigError(
            f"{file}: tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(place.shape)}"
        )
    if tensor.dtype not in place.dtypes:
        raise ConfigError(
            f"{file}: tensor {name} is stored as {str(tensor.dtype).removeprefix('torch.')}; "
            "quantized checkpoints are not supported, use one in float32, bfloat16 or float16"
        )


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the one, or those the index names, in order. Raises ConfigError."""
    if (path / _INDEX_FILE).is_file():
        return _indexed_files(path)
    if (path / _SINGLE_FILE).is_file():
        return [path / _SINGLE_FILE]
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(path.glob(pattern))]
    reason = f"it has only {', '.join(pickles)}, and pickle files can run code" if pickles else "it has neither"
    raise ConfigError(
        f"{path} needs {_SINGLE_FILE} or {_INDEX_FILE}: {reason}. "
        "Save it again with transformers: model.save_pretrained(directory)"
    )


def _indexed_files(path: Path) -> list[Path]:
    index = path / _INDEX_FILE
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
