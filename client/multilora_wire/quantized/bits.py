"""Integers of 2 to 8 bits out of a dense stream of 32-bit words."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def num_words(bits: int, count: int) -> int:
    """32-bit words of a stream of `count` values."""
    return -(-bits * count // 32)


def unpack(words: npt.NDArray[np.int32], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """Value i of a row lies at the bits i * bits .. (i + 1) * bits of the row, the lowest bit of word 0 first.

    words: [rows, num_words(bits, count)]; values may straddle words. Returns [rows, count], values below 2 ** bits.
    """
    stream = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    values = _unpack_bytes(stream, bits) if 8 % bits == 0 else _unpack_steps(stream, bits, count)
    return values[:, :count]


def _unpack_bytes(stream: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """The values of whole bytes: all of a byte at once, first its halves apart, then theirs."""
    num_values = 8 // bits
    spread = stream.astype(f"<u{num_values}")
    number = spread.dtype.type
    together = num_values // 2
    while together:
        field, used = 8 * together, bits * together
        spread |= spread << number(field - used)
        spread &= number(sum(((1 << used) - 1) << start for start in range(0, 8 * num_values, field)))
        together //= 2
    return spread.view(np.uint8)


def _unpack_steps(stream: npt.NDArray[np.uint8], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """The fewest values that take whole bytes make a step; one place of all steps after another."""
    divisor = math.gcd(bits, 8)
    num_values, num_bytes = 8 // divisor, bits // divisor
    num_steps = -(-count // num_values)
    if (missing := num_steps * num_bytes - stream.shape[1]) > 0:
        stream = np.pad(stream, ((0, 0), (0, missing)))
    steps = stream[:, : num_steps * num_bytes].reshape(len(stream), num_steps, num_bytes)
    values = np.empty((len(stream), num_steps, num_values), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for index in range(num_values):
        byte, shift = divmod(index * bits, 8)
        low = steps[:, :, byte] >> np.uint8(shift)
        if shift + bits > 8:
            low |= steps[:, :, byte + 1] << np.uint8(8 - shift)
        np.bitwise_and(low, mask, out=values[:, :, index])
    return values.reshape(len(stream), -1)
