"""Safetensors files, read some bytes at a time: from a file, or from the bytes of a request.

Files are read and not mapped: somebody who truncates a mapped file ends the process (SIGBUS). The header of a file is
believed only where it adds up: known fields, names that differ, and tensors that fill the data without holes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from multilora_wire.messages import shown

MAX_HEADER_BYTES = 100_000_000
"""The longest header that the format allows."""

_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 8
_MAX_QUOTED_CHARS = 200

_BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64"), 64),
}
"""Bits of a value, by the format's names of its types. Values of other types are never read."""


class TensorFileError(Exception):
    """A file is no safetensors file, or ends too early. The text names tensors and numbers, but not the file."""


class ByteSource(Protocol):
    """The bytes of a file, wherever they are."""

    @property
    def num_bytes(self) -> int:
        """The length of the file."""
        ...

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """The bytes from `start` up to `stop`. Raises TensorFileError if the file ends before."""
        ...


class MemoryBytes:
    """The bytes of a file that is in memory; they are not copied."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data).cast("B")

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    def read(self, start: int, stop: int) -> memoryview:
        return self._data[start:stop]


class FileBytes:
    """The bytes of a file on disk, read when they are asked for. A context manager that closes the file."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._file = path.open("rb", buffering=0)
        self._num_bytes = os.fstat(self._file.fileno()).st_size

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def read(self, start: int, stop: int) -> bytes:
        data = os.pread(self._file.fileno(), stop - start, start)
        while len(data) < stop - start:  # a read gives at most 2 GiB
            more = os.pread(self._file.fileno(), stop - start - len(data), start + len(data))
            if not more:
                raise TensorFileError(f"the file ends at byte {start + len(data)}, before byte {stop}")
            data += more
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a file. dtype: the format's name, such as `BF16`. start, stop: its bytes in the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class TensorSlice:
    """A matrix within a tensor: the value of a row and a column is number `start + row * row_stride + column *
    column_stride` of the tensor.

    num_mixed: so many matrices of one shape alternate value by value, and this one is number `start % num_mixed`.
    """

    start: int
    row_stride: int
    column_stride: int
    num_mixed: int = 1


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of a file. shape: as it is used. num_blocks: on its diagonal, which alone are in the file.

    A block-diagonal matrix `[rows, columns]` is stored as `[rows, columns / num_blocks]`.
    slice: the part of the tensor that the matrix is; None for a tensor that is the matrix.
    """

    place: TensorPlace
    shape: tuple[int, int]
    num_blocks: int = 1
    slice: TensorSlice | None = None


def read_tensor_places(source: ByteSource, max_header_bytes: int = MAX_HEADER_BYTES) -> dict[str, TensorPlace]:
    """The tensors of a file, by their names, in the order of the header. Raises TensorFileError."""
    if source.num_bytes < _LENGTH_BYTES:
        raise TensorFileError(f"it has {source.num_bytes} bytes, and the length of the header takes {_LENGTH_BYTES}")
    length = int.from_bytes(source.read(0, _LENGTH_BYTES), "little")
    if length > max_header_bytes:
        raise TensorFileError(f"its header has {length} bytes, {max_header_bytes} at most are read")
    first = _LENGTH_BYTES + length
    if first > source.num_bytes:
        raise TensorFileError(f"its header has {length} bytes, and the file has {source.num_bytes}")
    header = _parse_header(bytes(source.read(_LENGTH_BYTES, first)))
    places = {key: _read_place(key, entry, first) for key, entry in header.items() if key != "__metadata__"}
    _check_places(places, first, source.num_bytes)
    return places


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"its header is not JSON: {str(error)[:_MAX_QUOTED_CHARS]}") from None
    if not isinstance(header, dict):
        raise TensorFileError("its header is not a JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. JSON itself takes the last of several members of one name."""
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise TensorFileError(f"its header has {shown(name)} twice")
        members[name] = value
    return members


def _read_place(key: str, entry: Any, first: int) -> TensorPlace:
    """first: the byte of the file at which the data begins."""
    name = shown(key)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(f"{name} is not told by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise TensorFileError(
            f"{name} has dtype {_quoted(dtype)}, shape {_quoted(shape)} and data_offsets {_quoted(offsets)}"
        )
    num_bytes, bits = offsets[1] - offsets[0], _BITS.get(dtype)
    if num_bytes < 0 or (bits is not None and prod(shape) * bits != num_bytes * 8):
        raise TensorFileError(f"{name}, {shown(dtype)} {shape}, has {num_bytes} bytes by its data_offsets {offsets}")
    return TensorPlace(key, dtype, tuple(shape), first + offsets[0], first + offsets[1])


def _are_sizes(values: Any) -> bool:
    is_list = isinstance(values, list) and len(values) <= _MAX_DIMENSIONS
    return is_list and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_places(places: Mapping[str, TensorPlace], first: int, num_bytes: int) -> None:
    """Raises TensorFileError unless the tensors fill the data, one after another."""
    end, before = first, "the header"
    for place in sorted(places.values(), key=lambda place: (place.start, place.stop)):
        name = shown(place.key)
        if place.start != end:
            raise TensorFileError(f"{name} begins at byte {place.start}, and {before} ends at byte {end}")
        end, before = place.stop, name
    if end != num_bytes:
        raise TensorFileError(f"{before} ends at byte {end}, and the file has {num_bytes} bytes")


def _quoted(value: object) -> str:
    return repr(value)[:_MAX_QUOTED_CHARS]
