"""Products with weights in codes on a device, against float64 of what they mean; on a GPU and in the interpreter."""

from __future__ import annotations

import pytest
import torch

from multilora_kernels import CodeType, QuantizedWeight
from multilora_kernels.cuda import quantized

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of results of about one, which are rounded once, to the type of the activations.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
KINDS = [
    (CodeType.INT4, False),
    (CodeType.INT4, True),
    (CodeType.INT8, False),
    (CodeType.INT8, True),
    (CodeType.FP8, False),
]
"""Codes, and whether they have zeros."""

SHAPES = [(33, 64, 32), (17, 90, 90), (40, 300, 128), (5, 31, 31), (70, 96, 96), (9, 30, 7), (33, 40, 40)]
"""out_features, in_features, group_size: one group, several, a short last one, and ones too short for tiles."""


def _weight(shape, code_type, has_zeros, scale_dtype=torch.bfloat16) -> QuantizedWeight:
    out_features, in_features, group_size = shape
    generator = torch.Generator().manual_seed(in_features)
    # Of 16 bits, so that it is stored as a GPU's is.
    weight = QuantizedWeight(
        out_features, in_features, code_type, group_size, scale_dtype, DEVICE, compute_dtype=torch.bfloat16
    )
    codes = torch.randint(1 << code_type.bits, (out_features, in_features), generator=generator).to(torch.uint8)
    spread = 64 if code_type is CodeType.FP8 else (1 << code_type.bits) / 4
    num_groups = weight.num_groups
    scales = torch.rand(out_features, num_groups, generator=generator).add(0.5) * in_features**-0.5 / spread
    zeros = None
    if code_type is CodeType.FP8:
        codes[codes & 0x7F == 0x7F] = 1
        # Every number that there is, subnormal ones too.
        every = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
        codes.flatten()[: min(254, codes.numel())] = every[: codes.numel()]
    else:
        middle = 1 << (code_type.bits - 1)
        zeros = torch.full((out_features, num_groups), middle, dtype=torch.uint8)
        if has_zeros:
            zeros = torch.randint(1 << code_type.bits, zeros.shape, generator=generator).to(torch.uint8)
    weight.copy_rows(0, *(None if x is None else x.to(DEVICE) for x in (codes, scales.to(scale_dtype), zeros)))
    return weight


def _check(shape, kind, dtype, num_rows, has_bias=False, scale_dtype=torch.bfloat16) -> None:
    weight = _weight(shape, *kind, scale_dtype)
    out_features, in_features, _ = shape
    generator = torch.Generator().manual_seed(num_rows)
    # Rows that lie apart, between numbers that are none.
    wide = torch.full((num_rows, in_features + 8), torch.nan)
    x = wide.to(dtype)[:, :in_features].copy_(torch.randn(num_rows, in_features, generator=generator))
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    exact = x.double() @ weight.rows(0, out_features).cpu().double().T + (0 if bias is None else bias.double())
    wide = wide.to(dtype).to(DEVICE)
    on_device = wide[:, :in_features].copy_(x)
    actual = quantized.linear_of_codes(
        on_device, quantized.Codes(*weight.plain), None if bias is None else bias.to(DEVICE)
    )
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.cpu().double(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_times_codes_of_every_shape(shape, kind):
    _check(shape, kind, torch.bfloat16, 3, has_bias=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_every_dtype(kind, dtype):
    _check((40, 300, 128), kind, dtype, 17, scale_dtype=torch.float32)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 65, quantized.MAX_ROWS + 1])
def test_any_number_of_rows(num_rows):
    # Not of bfloat16: the interpreter cuts the floats of many rows off, where a GPU rounds them.
    _check((33, 64, 32), KINDS[1], torch.float16, num_rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [3, 40, 70])
@pytest.mark.parametrize("shape", [(37, 1100, 128), (70, 1090, 1090)])
def test_programs_of_splits_of_the_inputs_add_up_and_leave_nothing_behind(shape, num_rows, kind):
    weight = quantized.Codes(*_weight(shape, *kind).plain)
    assert quantized.plan_of(weight, num_rows, is_wide=False).num_splits > 1
    for _ in range(2):
        _check(shape, kind, torch.bfloat16, num_rows, has_bias=True)


# The interpreter cuts bfloat16 off where a GPU rounds.
@pytest.mark.parametrize("dtype", list(TOLERANCES)[: 3 if DEVICE.type == "cuda" else 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(17, 300, 128), (40, 30, 7), (3, 517, 517)])
def test_weights_become_the_floats_that_their_codes_mean_bit_for_bit(shape, kind, dtype):
    weight = _weight(shape, *kind)
    actual = quantized.dequantized(quantized.Codes(*weight.plain), dtype)
    assert torch.equal(actual, weight.rows(0, shape[0]).to(dtype))
