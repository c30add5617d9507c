"""bfloat16 as NumPy can hold it: the upper 16 bits of a float32, in uint16 (NumPy has no such type)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Exact: the lower 16 bits are zero."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even. `values` must hold no NaN; beyond the largest bfloat16 they become infinite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    ties_to_even = (bits >> 16) & 1
    return ((bits + 0x7FFF + ties_to_even) >> 16).astype(np.uint16)
