"""Load a checkpoint directory. Only safetensors and GGUF: they hold numbers and nothing that could run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from multilora_engine.errors import ConfigError
from multilora_engine.models.checkpoint import Checkpoint
from multilora_engine.models.model import Model
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.quantization.format import weight_format
from multilora_engine.models.registry import build_model, check_model, read_model_config
from multilora_engine.models.weights import Destination, Placement, WeightFormat

_FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_model(
    path: Path,
    placement: Placement,
    on_progress: Callable[[int, int], None] | None = None,
    config: ModelConfig | None = None,
) -> Model:
    """Read the checkpoint in the directory `path` tensor by tensor into a model that lies as `placement` says.

    on_progress: called with (tensors loaded, tensors in all). config: as `read_model_config` gives it, where the caller
    has read it already.

    Raises ConfigError, which names the tensor, when one is missing, unexpected, stored twice, of another shape or type,
    or disagrees with another; also where `check_model` finds another answer than transformers gives.
    """
    config = config or read_model_config(path)
    with contextlib.closing(Checkpoint(path)) as checkpoint:
        weights = weight_format(checkpoint, placement)
        model = build_model(config, weights, checkpoint.tensors)
        loading = _Loading(model, weights, on_progress)
        for name, tensor, file in checkpoint.read():
            loading.take(name, tensor, file)
    loading.finish(path)
    check_model(model)
    return model


def stored_dtype(path: Path) -> torch.dtype:
    """The type that holds every float weight of the checkpoint as it is: that of its matrices, at most float32.

    It is read from the files: the type in config.json may be any that the checkpoint once had. Matrices of scales are
    no weights.
    """
    tensors = Checkpoint(path).tensors
    stored = {tensor.dtype for name, tensor in tensors.items() if name.endswith(".weight") and len(tensor.shape) == 2}
    dtypes = [dtype for name, dtype in _FLOAT_DTYPES.items() if name in stored]
    widest = functools.reduce(torch.promote_types, dtypes, dtypes[0]) if dtypes else torch.float32
    return torch.float32 if widest == torch.float64 else widest


class _Loading:
    """The progress of one load: `_waiting` holds the places that have not been filled yet."""

    def __init__(self, model: Model, weights: WeightFormat, on_progress: Callable[[int, int], None] | None) -> None:
        self._weights = weights
        self._waiting = model.checkpoint_tensors()
        self._expected = frozenset(self._waiting)
        self._on_progress = on_progress
        self._embeddings = model.embedding_rows()
        self._ignores = model.ignores
        self._head, self._embeddings_name = model.config.head_name, model.config.embeddings_name
        copies = model.config.embedding_copies if self._embeddings is not None else ()
        self._copies = frozenset(f"{name}.weight" for name in copies)
        self._stored_copies: dict[str, torch.Tensor] = {}

    def take(self, name: str, tensor: torch.Tensor, file: Path) -> None:
        """Store one tensor of a file. Raises ConfigError for one that the model does not have so."""
        if name not in self._expected and self._ignores(name):
            return
        if name in self._copies:
            self._stored_copies[name] = tensor
            return
        if name not in self._expected and self._weights.ignores(name, tensor):
            return
        place = self._claim(name, file)
        _check_tensor(name, tensor, place, file)
        place.copy_(tensor)
        if self._on_progress is not None:
            self._on_progress(len(self._expected) - len(self._waiting), len(self._expected))

    def finish(self, path: Path) -> None:
        if self._waiting:
            names = ", ".join(sorted(self._waiting)[:5])
            raise ConfigError(f"{path}: {len(self._waiting)} tensors are missing from the checkpoint: {names}")
        for name, tensor in self._stored_copies.items():
            if not self._is_embedding(tensor):
                raise ConfigError(f"{path}: {name} differs from {self._embeddings_name}.weight{self._advice(name)}")

    def _is_embedding(self, copy: torch.Tensor) -> bool:
        assert self._embeddings is not None
        embeddings = self._embeddings.tensor()
        return torch.equal(copy.to(embeddings), embeddings)

    def _advice(self, copy: str) -> str:
        if copy == f"{self._head}.weight":
            return " although config.json says tie_word_embeddings; write false there to use it"
        return ": encoder and decoder must have the same embeddings"

    def _claim(self, name: str, file: Path) -> Destination:
        is_tied = f"{self._head}.weight" in self._copies
        if name not in self._expected and is_tied and name.startswith(f"{self._head}."):
            raise ConfigError(
                f"{file}: tensor {name} is part of a head of its own although config.json says tie_word_embeddings; "
                "write false there to use it"
            )
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
            f"{file}: tensor {name} is stored as {_dtype_name(tensor.dtype)}, expected "
            f"{' or '.join(sorted(map(_dtype_name, place.dtypes)))}; a quantised checkpoint says so in "
            "quantization_config of config.json, and has scales beside its codes"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
