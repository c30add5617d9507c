"""Load a Hugging Face checkpoint directory. Only safetensors: they hold numbers and nothing that could run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from multilora_engine.errors import ConfigError
from multilora_engine.models.llama import LlamaModel
from multilora_engine.models.model_config import read_model_config

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROTARY_BUFFER = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
"""Stored by old versions of transformers; it follows from config.json."""


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
) -> LlamaModel:
    """Read the checkpoint in the directory `path` tensor by tensor into a model on `device`, converted to `dtype`.

    `on_progress` is called with (tensors loaded, tensors in all). Raises ConfigError, which names the tensor, when one
    is missing, unexpected, stored twice, of another shape, or not of a float type.
    """
    model = LlamaModel(read_model_config(path), dtype, device)
    loading = _Loading(model, on_progress)
    for file in _checkpoint_files(path):
        loading.read_file(file)
    loading.finish(path)
    return model


class _Loading:
    """The progress of one load: `_waiting` holds the views that have not been filled yet."""

    def __init__(self, model: LlamaModel, on_progress: Callable[[int, int], None] | None) -> None:
        self._waiting = model.checkpoint_tensors()
        self._expected = frozenset(self._waiting)
        self._on_progress = on_progress
        self._embed_tokens = model.embed_tokens
        self._tied_head: torch.Tensor | None = None
        self._is_tied = model.config.tie_word_embeddings

    def read_file(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    self._take(name, tensors.get_tensor(name), file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error

    def finish(self, path: Path) -> None:
        if self._waiting:
            names = ", ".join(sorted(self._waiting)[:5])
            raise ConfigError(f"{path}: {len(self._waiting)} tensors are missing from the checkpoint: {names}")
        if self._tied_head is not None and not torch.equal(self._tied_head, self._embed_tokens):
            raise ConfigError(
                f"{path}: lm_head.weight differs from model.embed_tokens.weight although config.json says "
                "tie_word_embeddings; write false there to use it"
            )

    def _take(self, name: str, tensor: torch.Tensor, file: Path) -> None:
        if _ROTARY_BUFFER.fullmatch(name):
            return
        if name == "lm_head.weight" and self._is_tied:
            self._tied_head = tensor.to(self._embed_tokens)
            return
        view = self._claim(name, file)
        _check_tensor(name, tensor, view, file)
        view.copy_(tensor)
        if self._on_progress is not None:
            self._on_progress(len(self._expected) - len(self._waiting), len(self._expected))

    def _claim(self, name: str, file: Path) -> torch.Tensor:
        if name not in self._expected:
            raise ConfigError(f"{file}: unexpected tensor {name}: config.json describes a model without it")
        if name not in self._waiting:
            raise ConfigError(f"{file}: tensor {name} is stored twice in this checkpoint")
        return self._waiting.pop(name)


def _check_tensor(name: str, tensor: torch.Tensor, view: torch.Tensor, file: Path) -> None:
    if tensor.shape != view.shape:
        raise ConfigError(
            f"{file}: tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(view.shape)}"
        )
    if tensor.dtype not in _FLOAT_DTYPES:
        raise ConfigError(
            f"{file}: tensor {name} is stored as {str(tensor.dtype).removeprefix('torch.')}; "
            "quantized checkpoints are not supported, use one in float32, bfloat16 or float16"
        )


def _checkpoint_files(path: Path) -> list[Path]:
    """The one file, or those the index names, in order."""
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
