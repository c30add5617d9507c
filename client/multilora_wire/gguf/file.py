"""`GGUFFile`: the header of a GGUF file, version 2 or 3, read and checked; values of tensors are not read.

The `gguf` package reads such headers, too. It makes several NumPy objects of every token: 12 s of a processor for the
262,144 tokens of Gemma 3, and 0.2 s here. It believes every count, so that a stranger's few bytes keep it busy for
hours. And it reads paths, not the bytes of a request.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from multilora_wire.gguf.blocks import TYPE_NAMES, TYPES
from multilora_wire.messages import shown
from multilora_wire.tensor_file import ByteSource, TensorFileError, TensorPlace

GGUF_MAGIC = b"GGUF"
MAX_HEADER_BYTES = 256 << 20

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 16
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 256
_MAX_STRINGS = 1 << 22
"""Of one array: a Python object each."""
_PIECE_BYTES = 1 << 20

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""NumPy's types by the numbers of GGUF's types of values."""

Value = Any
"""int, float, bool or str, or a list of one of them."""


@dataclass(frozen=True)
class GGUFFile:
    """metadata: values by their keys. tensors: by their names, in the order of the file.

    A tensor's dtype is ggml's name, such as `Q4_K`; its shape has the rows first, as in Hugging Face's checkpoints.
    """

    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorPlace]


def read_gguf(source: ByteSource, max_header_bytes: int = MAX_HEADER_BYTES) -> GGUFFile:
    """Read the header of a file. Raises TensorFileError, which names key or tensor, where it does not add up."""
    header = _Header(source, max_header_bytes)
    if header.take(len(GGUF_MAGIC)) != GGUF_MAGIC:
        raise TensorFileError("it does not begin with GGUF")
    version = header.number("<u4")
    if version not in _VERSIONS:
        what = "is big-endian or damaged" if version & 0xFFFF == 0 else f"has version {version}"
        raise TensorFileError(f"it {what}; versions {' and '.join(map(str, _VERSIONS))}, little-endian, are read")
    num_tensors, num_values = header.number("<u8"), header.number("<u8")
    metadata: dict[str, Value] = {}
    for _ in range(num_values):
        key = header.string(_MAX_NAME_BYTES)
        if key in metadata:
            raise TensorFileError(f"its metadata has {shown(key)} twice")
        metadata[key] = header.value(key)
    entries = [_read_entry(header) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise TensorFileError(f"general.alignment is {alignment!r}, a power of two is expected")
    first = -(-header.position // alignment) * alignment
    tensors: dict[str, TensorPlace] = {}
    for entry in entries:
        if entry.key in tensors:
            raise TensorFileError(f"it has the tensor {shown(entry.key)} twice")
        tensors[entry.key] = _place(entry, first, alignment, source.num_bytes)
    in_order = sorted(tensors.values(), key=lambda place: place.start)
    for one, other in pairwise(in_order):
        if other.start < one.stop:
            raise TensorFileError(
                f"{shown(other.key)} begins at byte {other.start}, and {shown(one.key)} ends at byte {one.stop}"
            )
    return GGUFFile(metadata, tensors)


class _Header:
    """Reads the bytes of a header in their order. Nothing is believed that goes beyond the file or the limit."""

    def __init__(self, source: ByteSource, max_bytes: int) -> None:
        self._source = source
        self._end = min(source.num_bytes, max_bytes)
        self._max_bytes = max_bytes
        self._data = memoryview(b"")
        self._first = 0  # of _data, in the file
        self.position = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        return bytes(self._view(count))

    def number(self, kind: str) -> int:
        return int(np.frombuffer(self._view(np.dtype(kind).itemsize), kind)[0])

    def string(self, max_bytes: int | None = None) -> str:
        (length,) = struct.unpack("<Q", self._view(8))
        if max_bytes is not None and length > max_bytes:
            raise TensorFileError(f"a name at byte {self.position} has {length} bytes, {max_bytes} at most are read")
        try:
            return str(self._view(length), "utf-8")
        except UnicodeDecodeError as error:
            raise TensorFileError(f"the text that ends at byte {self.position} is not UTF-8: {error.reason}") from None

    def value(self, key: str) -> Value:
        kind = self.number("<u4")
        if kind != _ARRAY:
            return self._scalar(key, kind)
        item, count = self.number("<u4"), self.number("<u8")
        if item == _STRING:
            if count > _MAX_STRINGS:
                raise TensorFileError(f"{shown(key)} has {count} texts, {_MAX_STRINGS} at most are read")
            return [self.string() for _ in range(count)]
        dtype = self._dtype(key, item)
        return np.frombuffer(self._view(count * dtype.itemsize), dtype).tolist()

    def _scalar(self, key: str, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        dtype = self._dtype(key, kind)
        return np.frombuffer(self._view(dtype.itemsize), dtype)[0].item()

    def _dtype(self, key: str, kind: int) -> np.dtype[Any]:
        if kind not in _SCALARS:
            raise TensorFileError(f"{shown(key)} has a value of type {kind}, which GGUF does not have")
        return np.dtype(_SCALARS[kind])

    def _view(self, count: int) -> memoryview:
        stop = self.position + count
        if stop > self._end:
            limit = f"{self._max_bytes} at most are read" if self._end == self._max_bytes else "the file ends before"
            raise TensorFileError(f"its header goes on to byte {stop}: {limit}")
        if stop > self._first + len(self._data):
            end = min(max(stop, self.position + _PIECE_BYTES), self._end)
            self._data, self._first = memoryview(self._source.read(self.position, end)), self.position
        start = self.position - self._first
        self.position = stop
        return self._data[start : start + count]


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header tells it. kind: the number of its type. offset: from the first tensor's byte."""

    key: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _read_entry(header: _Header) -> _Entry:
    key = header.string(_MAX_NAME_BYTES)
    num_dimensions = header.number("<u4")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise TensorFileError(f"{shown(key)} has {num_dimensions} dimensions, 1 to {_MAX_DIMENSIONS} are read")
    shape = tuple(header.number("<u8") for _ in range(num_dimensions))
    return _Entry(key, shape[::-1], header.number("<u4"), header.number("<u8"))


def _place(entry: _Entry, first: int, alignment: int, num_bytes: int) -> TensorPlace:
    name = shown(entry.key)
    if entry.kind not in TYPE_NAMES:
        raise TensorFileError(f"{name} has type {entry.kind}, which is not known here")
    dtype = TYPE_NAMES[entry.kind]
    if dtype not in TYPES:
        raise TensorFileError(
            f"{name} is {dtype}, which is not served, only {', '.join(TYPES)}; quantise the model again to one of these"
        )
    kind, shape = TYPES[dtype], entry.shape
    if 0 in shape or prod(shape) >= 1 << 62 or shape[-1] % kind.num_values:
        raise TensorFileError(
            f"{name} has shape {list(shape)}, and a row of {dtype} is whole blocks of {kind.num_values}"
        )
    if entry.offset % alignment:
        raise TensorFileError(f"{name} has offset {entry.offset}, which is no multiple of {alignment}")
    start = first + entry.offset
    stop = start + prod(shape) // kind.num_values * kind.num_bytes
    if stop > num_bytes:
        raise TensorFileError(f"{name} ends at byte {stop}, and the file has {num_bytes} bytes")
    return TensorPlace(entry.key, dtype, shape, start, stop)
