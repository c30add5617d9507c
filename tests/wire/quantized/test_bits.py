"""The unpacker against Python's integers of any length, which are bit streams by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from multilora_wire.quantized.bits import num_words, unpack


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [1, 7, 8, 31, 32, 33, 100])
def test_value_i_lies_at_bit_i_times_bits(bits: int, count: int) -> None:
    rng = np.random.default_rng(bits * 1000 + count)
    values = rng.integers(0, 1 << bits, (3, count))
    words = np.array([packed(row, bits) for row in values.tolist()], np.uint32).view(np.int32)
    assert words.shape == (3, num_words(bits, count))
    np.testing.assert_array_equal(unpack(words, bits, count), values)


def packed(values: list[int], bits: int) -> list[int]:
    """Dense from the lowest bit on; the bits after the last value are ones, which must not count."""
    size = -(-len(values) * bits // 32) * 32
    stream = (1 << size) - (1 << len(values) * bits)
    for index, value in enumerate(values):
        stream |= value << index * bits
    return [stream >> start & 0xFFFFFFFF for start in range(0, size, 32)]


def test_columns_of_a_transposed_matrix_are_rows() -> None:
    words = np.arange(12, dtype=np.int32).reshape(2, 6)
    np.testing.assert_array_equal(unpack(words.T, 4, 16), unpack(np.ascontiguousarray(words.T), 4, 16))
