"""The slower paths of the GPU's operators that are no references of the tests, in shapes that they cut into pieces.

That all of them are right is in `test_self_test`, where GPU operators serve CPU tensors.
"""

from __future__ import annotations

import pytest
import torch
from support.attention_cases import OPTIONS, fields, make_case

from multilora_kernels import CodeType, QuantizedWeight, reference, slower_operators
from multilora_kernels.slower_operators import SLOWER_OPERATORS


@pytest.mark.parametrize("scores_at_once", [1, 20_000, 1 << 25])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", ["wide group", "odd head_dim"])
@pytest.mark.parametrize("sequences", ["decode", "prefill", "chunks behind a prefix"])
def test_attention_in_pieces_is_that_of_the_reference(monkeypatch, sequences, shape, options, window, scores_at_once):
    monkeypatch.setattr(slower_operators, "_SCORES_AT_ONCE", scores_at_once)
    case = make_case(shape, sequences, options=options, window=window)
    actual = SLOWER_OPERATORS["paged_attention"](*fields(case))
    expected = reference.paged_attention(*fields(case, torch.float64))
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs_at_once", [1, 5, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_weight_of_codes_in_pieces_is_the_whole(monkeypatch, has_bias, outputs_at_once):
    monkeypatch.setattr(slower_operators, "_OUTPUTS_AT_ONCE", outputs_at_once)
    generator = torch.Generator().manual_seed(0)
    # Not packed, as on a GPU.
    weight = QuantizedWeight(13, 24, CodeType.INT4, 8, torch.float16, torch.device("cpu"), compute_dtype=torch.float16)
    codes, zeros = (torch.randint(16, (13, n), generator=generator, dtype=torch.uint8) for n in (24, 3))
    scales = torch.rand(13, 3, generator=generator).half()
    weight.copy_rows(0, codes, scales, zeros)
    x, bias = torch.randn(7, 24, generator=generator), torch.randn(13, generator=generator)
    meaning = (codes.double() - zeros.double().repeat_interleave(8, 1)) * scales.double().repeat_interleave(8, 1)
    actual = SLOWER_OPERATORS["quantized_linear"](x, weight, bias if has_bias else None)
    expected = x.double() @ meaning.T + (bias if has_bias else 0)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
