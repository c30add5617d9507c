"""Integers of 2 to 8 bits out of a dense stream of 32-bit words."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_STEP = 8
"""So many values of b bits take b whole bytes, whatever b is."""


def num_words(bits: int, count: int) -> int:
    """32-bit words of a stream of `count` values."""
    return -(-bits * count // 32)


def unpack(words: npt.NDArray[np.int32], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """Value i of a row lies at the bits i * bits .. (i + 1) * bits of the row, the lowest bit of word 0 first.

    words: [rows, num_words(bits, count)]; values may straddle words. Returns [rows, count], values below 2 ** bits.
    """
    rows = len(words)
    stream = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    if bits == _STEP:
        return stream[:, :count]
    num_steps = -(-count // _STEP)
    if (missing := num_steps * bits - stream.shape[1]) > 0:
        stream = np.pad(stream, ((0, 0), (0, missing)))
    steps = stream[:, : num_steps * bits].reshape(rows, num_steps, bits)
    values = np.empty((rows, num_steps, _STEP), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for index in range(_STEP):
        byte, shift = divmod(index * bits, 8)
        low = steps[:, :, byte] >> np.uint8(shift)
        if shift + bits > 8:
            low |= steps[:, :, byte + 1] << np.uint8(8 - shift)
        np.bitwise_and(low, mask, out=values[:, :, index])
    return values.reshape(rows, -1)[:, :count]
