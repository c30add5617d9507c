"""The stored form of one row of an adapter: its A, B and, for DoRA, its magnitude, each a *piece*. Sizes, no weights.

Floats are stored one after another. Codes of 8 bits (int8, fp8) and 4 bits (int4) have scales among them, and B of a
module of several sites is stored site by site: `multilora_kernels.adapter_codes` says how. Magnitudes and rows
of tokens of adapters of codes are float32.

A of embeddings is stored as `[vocabulary, rank]`, so that the values of a token are neighbours. Its codes lie as the
codes of a B.
Rows of tokens are two pieces: the ids, int32 and ascending, and the rows `[ids, hidden size]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from multilora_wire.sites import WireModule

StoredDtype = Literal["float32", "bfloat16", "float16", "int8", "fp8", "int4"]

CODE_BITS = {"int8": 8, "fp8": 8, "int4": 4}
"""Bits of a code, by the dtypes that store codes."""

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT_BYTES = 4
_ID_BYTES = 4

_LANES = 16
_SCALE_BYTES = 2 * _LANES
_BLOCK_COLUMNS = 16


@dataclass(frozen=True)
class Piece:
    """One matrix or vector of an adapter: so many values in so many bytes."""

    num_values: int
    num_bytes: int


def stored_pieces(module: WireModule, rank: int, is_dora: bool, dtype: str) -> list[Piece]:
    """A, B and, for DoRA, the magnitude of one row; or ids and rows of `rank` tokens.

    Raises KeyError for a dtype that is none of `StoredDtype`.
    """
    if module.kind == "rows":
        size = rank * module.out_size
        return [Piece(rank, rank * _ID_BYTES), Piece(size, size * magnitude_itemsize(dtype))]
    a, b = rank * module.in_size, rank * module.out_size
    pieces = [Piece(a, _a_bytes(module, rank, dtype)), Piece(b, part_offset(module, len(module.parts), rank, dtype))]
    return pieces + ([Piece(module.out_size, module.out_size * magnitude_itemsize(dtype))] if is_dora else [])


def part_offset(module: WireModule, index: int, rank: int, dtype: str) -> int:
    """Bytes of B before the part of this index; all of its bytes, if there is no such part."""
    bounds = part_bounds(module)
    if dtype not in CODE_BITS:
        return bounds[index] * rank * _ITEMSIZES[dtype]
    panels = sum(-(-(end - start) // _LANES) for start, end in pairwise(bounds[: index + 1]))
    return panels * _panel_bytes(rank, CODE_BITS[dtype])


def part_bounds(module: WireModule) -> list[int]:
    """The first row of B of each part, and the number of its rows."""
    return [*(part.start for part in module.parts), module.out_size]


def magnitude_itemsize(dtype: str) -> int:
    """Bytes of a value of a magnitude, or of a row of a token."""
    return _FLOAT_BYTES if dtype in CODE_BITS else _ITEMSIZES[dtype]


def element_bytes(dtype: str) -> int:
    """Bytes in which the kernels count offsets: those of a float, or one."""
    return 1 if dtype in CODE_BITS else _ITEMSIZES[dtype]


def _a_bytes(module: WireModule, rank: int, dtype: str) -> int:
    bits = CODE_BITS.get(dtype)
    if bits and module.kind == "embedding":
        return -(-module.in_size // _LANES) * _panel_bytes(rank, bits)
    if bits == 8:
        return -(-4 * rank // 64) * 64 + rank * module.in_size
    if bits == 4:
        return rank * _panel_bytes(-(-module.in_size // _LANES), 4)
    return rank * module.in_size * _ITEMSIZES[dtype]


def _panel_bytes(columns: int, bits: int) -> int:
    if bits == 8:
        return _SCALE_BYTES + _LANES * columns
    blocks, pairs = -(-columns // _BLOCK_COLUMNS), -(-columns // 2)
    return blocks * _SCALE_BYTES + pairs * _LANES
