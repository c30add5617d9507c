"""MXFP4 against transformers' own conversion."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from multilora_wire.bfloat16 import bfloat16_to_float32
from multilora_wire.quantized.mxfp4 import MXFP4
from multilora_wire.quantized.scheme import QuantizationError


def test_every_float_times_every_power_of_two_is_the_number_of_transformers() -> None:
    exponents = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16).contiguous()
    blocks = torch.arange(256, dtype=torch.uint8).reshape(16, 16).expand(255, 16, 16).contiguous()
    shape = (255, 512)
    rows = MXFP4().rows(shape, {"blocks": blocks.numpy(), "scales": exponents.numpy()}, None)
    assert rows.zeros is not None
    scales = bfloat16_to_float32(rows.scales).astype(np.float64)
    codes = np.concatenate([rows.codes(0, 100), rows.codes(100, 155)]).reshape(255, 16, 32)
    values = (codes.astype(np.int64) - rows.zeros[:, :, None]) * scales[:, :, None]
    expected = convert_moe_packed_tensors(blocks[None], exponents[None], dtype=torch.float64)[0].T
    np.testing.assert_array_equal(values.reshape(shape), expected.numpy())


def test_rows_out_of_an_interleaved_tensor_are_those_of_a_copy() -> None:
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (6, 2, 16), np.uint8), rng.integers(0, 255, (6, 2), np.uint8)
    views = {"blocks": blocks[1::2], "scales": scales[1::2]}
    copies = {name: view.copy() for name, view in views.items()}
    strided, plain = (MXFP4().rows((3, 64), tensors, None) for tensors in (views, copies))
    np.testing.assert_array_equal(strided.codes(1, 2), plain.codes(1, 2))
    np.testing.assert_array_equal(strided.scales, plain.scales)


def test_powers_of_two_that_are_no_numbers_and_inputs_that_make_no_whole_groups_are_refused() -> None:
    tensors = {"blocks": np.zeros((1, 3, 16), np.uint8), "scales": np.array([[255, 254, 255]], np.uint8)}
    with pytest.raises(QuantizationError, match="scales holds 2 NaN"):
        MXFP4().rows((1, 96), tensors, None)
    with pytest.raises(QuantizationError, match="MXFP4 needs a multiple of 32 inputs, got 40"):
        MXFP4().tensors((8, 40), lambda suffix: None)
