"""The weights of a base model's checkpoint, one matrix at a time, with NumPy alone: what DoRA's magnitudes refer to."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multilora_client.bfloat16 import bfloat16_to_float32
from multilora_client.errors import AdapterError

_INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS_FILE = "model.safetensors"
_LENGTH_BYTES = 8
_DTYPES = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}


class BaseWeights:
    """A Hugging Face checkpoint in safetensors, in one file or several.

    The files are mapped, not read: a checkpoint may be larger than memory, and safetensors' NumPy front reads no
    bfloat16.
    """

    def __init__(self, directory: Path) -> None:
        """Raises AdapterError when `directory` holds no such checkpoint."""
        self._directory = directory
        self._file_of = _weight_map(directory)
        self._header = cache(_read_header)

    def matrix(self, name: str) -> npt.NDArray[np.float32]:
        """The weight `[out, in]` of a linear layer. Raises AdapterError when it is not there, or not a matrix."""
        path = self._directory / self._file_of.get(name, _WEIGHTS_FILE)
        start, tensors = self._header(path)
        if name not in tensors:
            raise AdapterError(f"{self._directory} has no {name}; it is not the base model of this adapter")
        dtype, shape, (first, _) = (tensors[name][field] for field in ("dtype", "shape", "data_offsets"))
        if dtype not in _DTYPES or len(shape) != 2:
            raise AdapterError(f"{path}: {name} is {dtype} {shape}; a matrix of F16, BF16 or F32 is expected")
        values = np.memmap(path, _DTYPES[dtype], "r", start + first, tuple(shape))
        return bfloat16_to_float32(values) if dtype == "BF16" else values.astype(np.float32)


def _weight_map(directory: Path) -> dict[str, str]:
    """Which file of `directory` holds which tensor; empty when one file holds all."""
    path = directory / _INDEX_FILE
    if not path.is_file():
        return {}
    try:
        files: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"{path} is not an index of safetensors files: {error!r}") from error
    return {name: Path(file).name for name, file in files.items()}


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors of a safetensors file begin, and what the file says about each."""
    if not path.is_file():
        raise AdapterError(f"{path} is missing; give the directory of the base model's checkpoint in safetensors")
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
    except (ValueError, OverflowError, MemoryError) as error:
        raise AdapterError(f"{path} is not a safetensors file: {error}") from error
    return _LENGTH_BYTES + length, header
