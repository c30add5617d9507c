"""Types of ggml against the `gguf` package's own dequantisation, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from multilora_wire.gguf.blocks import TYPE_NAMES, TYPES, dequantize
from multilora_wire.quantized.ggml import GGMLBlocks, with_one_layout
from multilora_wire.quantized.scheme import QuantizationError

QUANTIZED = [name for name, kind in TYPES.items() if kind.is_quantized]


def random_rows(name: str, num_rows: int = 7, num_blocks: int = 3, seed: int = 0) -> np.ndarray:
    """Any bytes, but finite scales: floats of 16 bits whose exponent is not all ones. Some scales are zero."""
    kind = TYPES[name]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_rows * num_blocks, kind.num_bytes), np.uint8)
    halves = [208] if name == "Q6_K" else [0, 2] if kind.has_minimums else [0]
    for first in halves:
        blocks[:, first + 1] &= 0xBF
    blocks[::5, halves[0] : halves[0] + 2] = 0
    return blocks.reshape(num_rows, -1)


def test_every_type_of_ggml_has_its_name_and_its_sizes() -> None:
    theirs = {int(kind): kind.name for kind in gguf.GGMLQuantizationType if kind.name not in ("NVFP4", "Q1_0")}
    assert theirs == TYPE_NAMES
    for name, kind in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.num_values, kind.num_bytes)


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_have_the_bits_of_the_package(name: str) -> None:
    rows = random_rows(name)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(dequantize(TYPES[name], rows), expected)


@pytest.mark.parametrize("other", [None, *QUANTIZED])
@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_mean_the_same_values_alone_and_in_a_layout_with_another_type(name: str, other: str | None) -> None:
    rows, scheme = random_rows(name), GGMLBlocks.of(name)
    if other is not None:
        layouts = with_one_layout([scheme, GGMLBlocks.of(other)])
        assert layouts is not None
        scheme = layouts[0]
    expected = dequantize(TYPES[name], rows)
    found = scheme.rows(expected.shape, {scheme.tensor_name: rows}, None)
    assert found.zeros is not None
    codes = found.codes(2, 4)
    assert codes.max() < (16 if scheme.code_name == "int4" else 256)
    scales = found.scales[2:6].astype(np.float64).repeat(scheme.group_size, axis=1)
    zeros = found.zeros[2:6].astype(np.float64).repeat(scheme.group_size, axis=1)
    values = scales * (codes - zeros)
    if TYPES[name].has_minimums:
        largest = np.abs(expected[2:6]).max(axis=1, keepdims=True)
        np.testing.assert_allclose(values / largest, expected[2:6] / largest, rtol=0, atol=3e-7)
    else:
        np.testing.assert_array_equal(values.astype(np.float32), expected[2:6])
        assert found.zeros.min() == found.zeros.max() == (8 if scheme.code_name == "int4" else 128)


@pytest.mark.parametrize("name", QUANTIZED)
def test_scales_that_are_no_numbers_are_refused(name: str) -> None:
    rows, scheme = random_rows(name), GGMLBlocks.of(name)
    first = 208 if name == "Q6_K" else 0
    rows[3, first : first + 2] = 0xFF, 0x7F
    if name.endswith("_K"):
        rows[3, 4 if name != "Q6_K" else 192] = 1
    shape = dequantize(TYPES[name], random_rows(name)).shape
    with pytest.raises(QuantizationError, match=rf"weight\.{name} holds scales or minimums that are not finite"):
        scheme.rows(shape, {scheme.tensor_name: rows}, None)
