"""The types of ggml's tensors (llama.cpp `ggml/src/ggml-common.h`, `ggml-quants.c`).

A row of a quantised tensor is a row of blocks. Some neighbouring values of a block, a group, share a scale, and in some
types a minimum: value = scale * (code - zero), or scale * code - minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
_LOW, _FOUR = np.uint8(15), np.uint8(4)


Floats = npt.NDArray[np.float32]
Scales = tuple[npt.NDArray[np.float16] | Floats, Floats | None]
"""The scales of some blocks, `[blocks, groups]`, and the minimums, None in types without."""


@dataclass(frozen=True)
class BlockType:
    """num_values, num_bytes: of a block. The other fields are of quantised types.

    bits: of a code. group_size: values that share a scale. scale_dtype: the type that holds the scales exactly.
    codes: of blocks `[n, num_bytes]`, `[n, num_values]` uint8. scales: of blocks.
    """

    num_values: int
    num_bytes: int
    bits: int = 0
    group_size: int = 0
    scale_dtype: Literal["F16", "F32"] = "F16"
    has_minimums: bool = False
    codes: Callable[[Bytes], Bytes] | None = None
    scales: Callable[[Bytes], Scales] | None = None

    @property
    def is_quantized(self) -> bool:
        return self.codes is not None

    @property
    def zero(self) -> int:
        """The middle of the codes. Types without minimums subtract it from all codes."""
        return 1 << self.bits >> 1


def row_codes(kind: BlockType, rows: Bytes) -> Bytes:
    """The codes of whole rows `[n, bytes]` of a quantised type: `[n, values]`."""
    assert kind.codes is not None
    return kind.codes(np.ascontiguousarray(rows).reshape(-1, kind.num_bytes)).reshape(len(rows), -1)


def row_scales(kind: BlockType, rows: Bytes) -> Scales:
    """The scales and minimums of whole rows `[n, bytes]` of a quantised type: `[n, groups]` both."""
    assert kind.scales is not None
    scales, minimums = kind.scales(np.ascontiguousarray(rows).reshape(-1, kind.num_bytes))
    return scales.reshape(len(rows), -1), None if minimums is None else minimums.reshape(len(rows), -1)


def dequantize(kind: BlockType, rows: Bytes) -> Floats:
    """The values of whole rows `[n, bytes]`, `[n, values]`, rounded as ggml rounds them."""
    scales, minimums = row_scales(kind, rows)
    values = row_codes(kind, rows).astype(np.float32).reshape(*scales.shape, kind.group_size)
    if minimums is None:
        values -= np.float32(kind.zero)
    values *= scales.astype(np.float32)[..., None]
    if minimums is not None:
        values -= minimums[..., None]
    return values.reshape(len(rows), -1)


def _half(blocks: Bytes, first: int) -> npt.NDArray[np.float16]:
    """The float16 at a byte of each block, `[n, 1]`."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2")


def _nibbles(packed: Bytes) -> Bytes:
    """`[..., n]` -> `[..., 2 n]`: the low halves, then the high ones."""
    return np.concatenate([packed & _LOW, packed >> _FOUR], axis=-1)


def _fifth_bits(blocks: Bytes, first: int) -> Bytes:
    """The bits of a 32-bit word of each block, `[n, 32]`, where they belong above a nibble."""
    return np.unpackbits(blocks[:, first : first + 4], axis=1, bitorder="little") << _FOUR


def _scale(blocks: Bytes) -> Scales:
    return _half(blocks, 0), None


def _scale_and_minimum(blocks: Bytes) -> Scales:
    return _half(blocks, 0), -_half(blocks, 2).astype(np.float32)


def _k_scales(blocks: Bytes) -> Scales:
    """Scales and minimums of the 8 groups of Q4_K and Q5_K: float16 times integers of 6 bits, packed into 12 bytes."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    low, middle, high = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 2 & 48)], axis=1)
    return (
        _half(blocks, 0).astype(np.float32) * scales.astype(np.float32),
        _half(blocks, 2).astype(np.float32) * minimums.astype(np.float32),
    )


def _k_nibbles(packed: Bytes) -> Bytes:
    """128 bytes of a block as 8 groups of 32 nibbles."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q5_k_codes(blocks: Bytes) -> Bytes:
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return _k_nibbles(blocks[:, 48:176]) | bits << _FOUR


def _q6_k_codes(blocks: Bytes) -> Bytes:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    return low | high.reshape(-1, 8, 32) << _FOUR


def _q6_k_scales(blocks: Bytes) -> Scales:
    return _half(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8).astype(np.float32), None


TYPES: Mapping[str, BlockType] = {
    "F32": BlockType(1, 4),
    "F16": BlockType(1, 2),
    "BF16": BlockType(1, 2),
    "Q8_0": BlockType(32, 34, 8, 32, codes=lambda blocks: blocks[:, 2:34] ^ np.uint8(128), scales=_scale),
    "Q4_0": BlockType(32, 18, 4, 32, codes=lambda blocks: _nibbles(blocks[:, 2:18]), scales=_scale),
    "Q4_1": BlockType(32, 20, 4, 32, "F16", True, lambda blocks: _nibbles(blocks[:, 4:20]), _scale_and_minimum),
    "Q5_0": BlockType(
        32, 22, 5, 32, codes=lambda blocks: _nibbles(blocks[:, 6:22]) | _fifth_bits(blocks, 2), scales=_scale
    ),
    "Q5_1": BlockType(
        32,
        24,
        5,
        32,
        "F16",
        True,
        lambda blocks: _nibbles(blocks[:, 8:24]) | _fifth_bits(blocks, 4),
        _scale_and_minimum,
    ),
    "Q4_K": BlockType(256, 144, 4, 32, "F32", True, lambda blocks: _k_nibbles(blocks[:, 16:144]), _k_scales),
    "Q5_K": BlockType(256, 176, 5, 32, "F32", True, _q5_k_codes, _k_scales),
    "Q6_K": BlockType(256, 210, 6, 16, "F32", codes=_q6_k_codes, scales=_q6_k_scales),
}
"""The types that are read, by their names."""

TYPE_NAMES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""All types of ggml, by their numbers in a file."""
