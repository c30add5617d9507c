"""The weights of a base model's checkpoint, some rows at a time, with NumPy alone; DoRA's magnitudes refer to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from multilora_client.errors import AdapterError
from multilora_wire.bfloat16 import bfloat16_to_float32
from multilora_wire.checkpoint_directory import is_gguf, only_gguf
from multilora_wire.gguf.checkpoint import GGUFTensor, read_tensors
from multilora_wire.peft_files import EMBEDDINGS
from multilora_wire.quantized.quantization import Quantization, read_quantization
from multilora_wire.quantized.scheme import (
    Array,
    CodeName,
    QuantizationError,
    QuantizedRows,
    Scheme,
    StoredTensor,
    check_scales,
    check_stored,
    groups_of,
    input_order,
)
from multilora_wire.tensor_file import FileBytes, TensorFileError, TensorPlace, read_tensor_places

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
MODEL_CONFIG_FILE = "config.json"
_FLOATS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}
_DTYPES = _FLOATS | {"I8": "i1", "I32": "<i4", "I64": "<i8", "F8_E4M3": "u1"}
_VALUES_PER_TILE = 1 << 20


class BaseWeights:
    """A Hugging Face checkpoint in safetensors, in one file or several, of floats or quantised, or in GGUF.

    The files are mapped, not read: a checkpoint may be larger than memory, and safetensors' NumPy front reads no
    bfloat16.
    """

    def __init__(self, directory: Path) -> None:
        """Raises AdapterError when `directory` holds no such checkpoint."""
        has_weights = any((directory / name).is_file() for name in (_SINGLE_FILE, _INDEX_FILE))
        self._gguf: dict[str, GGUFTensor] | None = None
        if is_gguf(directory):
            try:
                self._gguf = read_tensors(directory)
            except TensorFileError as error:
                raise AdapterError(str(error)) from error
        elif not has_weights and (advice := only_gguf(directory)):
            raise AdapterError(advice)
        self._directory = directory
        self._file_of = _weight_map(directory)
        self._places = cache(_read_places)
        try:
            has_config = (directory / MODEL_CONFIG_FILE).is_file()
            self._quantization = read_quantization(directory) if has_config else Quantization()
        except QuantizationError as error:
            raise AdapterError(str(error)) from error

    def tiles(self, name: str, shape: tuple[int, int]) -> Iterator[npt.NDArray[np.float32]]:
        """The weight `[out, in]` of the linear `name`, or `[vocabulary, hidden size]` of embeddings, by some rows.

        shape: the adapter's.

        Raises AdapterError when it is not there, or of another shape.
        """
        if self._gguf is not None:
            yield from self._gguf_tiles(self._gguf.get(f"{name}.weight"), name, shape)
            return
        try:
            kind: Literal["Linear", "Embedding"] = "Embedding" if name == EMBEDDINGS else "Linear"
            scheme = self._quantization.scheme(name, kind, lambda suffix: self._has(f"{name}.{suffix}"))
            yield from self._float_tiles(name, shape) if scheme is None else self._coded_tiles(name, shape, scheme)
        except QuantizationError as error:
            raise AdapterError(f"{self._directory}: {name}: {error}") from error

    def _gguf_tiles(
        self, tensor: GGUFTensor | None, name: str, shape: tuple[int, int]
    ) -> Iterator[npt.NDArray[np.float32]]:
        if tensor is None:
            raise AdapterError(f"{self._directory} has no {name}.weight; it is not the base model of this adapter")
        if tensor.place.shape != shape:
            found = list(tensor.place.shape)
            raise AdapterError(f"{name} is {found} in the base model and {list(shape)} in the adapter")
        try:
            yield from tensor.float_tiles()
        except (OSError, TensorFileError) as error:
            raise AdapterError(f"cannot read {tensor.file}: {error}") from error

    def _float_tiles(self, name: str, shape: tuple[int, int]) -> Iterator[npt.NDArray[np.float32]]:
        weight = f"{name}.weight"
        stored = self._stored(weight)
        if stored is None:
            raise AdapterError(f"{self._directory} has no {weight}; it is not the base model of this adapter")
        if stored.dtype not in _FLOATS or len(stored.shape) != 2:
            raise AdapterError(
                f"{self._path(weight)}: {weight} is {stored.dtype} {list(stored.shape)}; a matrix of F16, BF16 or F32 "
                "is expected"
            )
        if stored.shape != shape:
            raise AdapterError(f"{name} is {list(stored.shape)} in the base model and {list(shape)} in the adapter")
        values = self._array(weight)
        for rows in _tiles(shape):
            yield _float32(values[rows])

    def _coded_tiles(self, name: str, shape: tuple[int, int], scheme: Scheme) -> Iterator[npt.NDArray[np.float32]]:
        expected = scheme.tensors(shape, lambda suffix: self._stored(f"{name}.{suffix}"))
        for suffix, one in expected.items():
            check_stored(f"{name}.{suffix}", self._stored(f"{name}.{suffix}"), one)
        arrays = {suffix: self._array(f"{name}.{suffix}") for suffix in expected}
        if scheme.scale_name is not None:
            check_scales(f"{name}.{scheme.scale_name}", arrays[scheme.scale_name])
        order = None
        if scheme.group_index_name in arrays:
            full_name = f"{name}.{scheme.group_index_name}"
            order = input_order(full_name, arrays[scheme.group_index_name], scheme.group_size)
        quantized = scheme.rows(shape, arrays, order)
        groups = np.arange(shape[1]) // groups_of(shape[1], scheme.group_size)[0]
        for rows in _tiles(shape):
            values = _dequantized(quantized, rows, groups, scheme.code_name)
            if order is None:
                yield values
            else:
                unordered = np.empty_like(values)
                unordered[:, order] = values
                yield unordered

    def _path(self, name: str) -> Path:
        return self._directory / self._file_of.get(name, _SINGLE_FILE)

    def _has(self, name: str) -> bool:
        return self._stored(name) is not None

    def _stored(self, name: str) -> StoredTensor | None:
        if self._file_of and name not in self._file_of:
            return None
        found = self._places(self._path(name)).get(name)
        return None if found is None else StoredTensor(found.dtype, found.shape)

    def _array(self, name: str) -> Array:
        path = self._path(name)
        place = self._places(path)[name]
        try:
            return np.memmap(path, _DTYPES[place.dtype], "r", place.start, place.shape)
        except ValueError as error:
            raise AdapterError(f"{path} ends before {name} does: {error}") from error


def _tiles(shape: tuple[int, int]) -> Iterator[slice]:
    step = max(1, _VALUES_PER_TILE // max(1, shape[1]))
    return (slice(first, min(first + step, shape[0])) for first in range(0, shape[0], step))


def _float32(values: Array) -> npt.NDArray[np.float32]:
    return bfloat16_to_float32(values) if values.dtype == np.uint16 else values.astype(np.float32)


def _dequantized(
    quantized: QuantizedRows, rows: slice, groups: npt.NDArray[np.int64], code_name: CodeName
) -> npt.NDArray[np.float32]:
    codes = quantized.codes(rows.start, rows.stop - rows.start)
    values = _float8_values()[codes] if code_name == "fp8" else codes.astype(np.float32)
    if quantized.zeros is not None:
        values -= quantized.zeros[rows].astype(np.float32)[:, groups]
    values *= _float32(quantized.scales[rows])[:, groups]
    return values


@cache
def _float8_values() -> npt.NDArray[np.float32]:
    """The values of all bytes as float8_e4m3fn: a sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, (byte & 7) / 8
    values = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    values[byte & 127 == 127] = np.nan
    return np.where(byte < 128, values, -values).astype(np.float32)


def _weight_map(directory: Path) -> dict[str, str]:
    """The file in `directory` that holds each tensor; empty when one file holds all, as the engine reads it."""
    path = directory / _INDEX_FILE
    if (directory / _SINGLE_FILE).is_file() or not path.is_file():
        return {}
    try:
        files: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"{path} is not an index of safetensors files: {error!r}") from error
    return {name: Path(file).name for name, file in files.items()}


def _read_places(path: Path) -> dict[str, TensorPlace]:
    """The tensors of a safetensors file. Raises AdapterError."""
    if not path.is_file():
        raise AdapterError(f"{path} is missing; give the directory of the base model's checkpoint in safetensors")
    try:
        with FileBytes(path) as file:
            return read_tensor_places(file)
    except TensorFileError as error:
        raise AdapterError(f"{path} is not a safetensors file: {error}") from error
