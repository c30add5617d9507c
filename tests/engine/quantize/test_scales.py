"""The search against compressed-tensors' own scales, and against trying very many."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from support.code_formats import FORMATS, make_args, make_codes, ugly_weight

from multilora_engine.quantize.scales import IntegerCodes, search_scales


def losses(
    weight: torch.Tensor,
    importance: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    args: QuantizationArgs,
) -> torch.Tensor:
    """sum h (w - w')^2 of each group, in float64, with w' as compressed-tensors computes it."""
    zero_point = None if zeros is None else zeros.to(torch.int8)
    rounded = fake_quantize(weight, scales.float(), zero_point, args)
    errors = importance.double() * (weight.double() - rounded.double()).square()
    return errors.view(len(weight), scales.shape[1], -1).sum(-1)


def min_max(weight: torch.Tensor, args: QuantizationArgs, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.view(len(weight), num_groups, -1)
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return scales.to(torch.bfloat16), zeros


@pytest.mark.parametrize("group_size", [3, 32, 96])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(("bits", "kind", "symmetric"), FORMATS)
def test_no_group_loses_more_than_with_the_scale_of_its_range(
    bits: int, kind: str, symmetric: bool, is_weighted: bool, group_size: int
) -> None:
    weight = ugly_weight()
    importance = torch.rand(96).square() + 0.01 if is_weighted else None
    args = make_args(bits, kind, symmetric, group_size)

    scales, zeros = search_scales(weight, importance, make_codes(bits, kind), group_size, symmetric, torch.bfloat16)

    h = torch.ones(96) if importance is None else importance
    found = losses(weight, h, scales, zeros, args)
    usual = losses(weight, h, *min_max(weight, args, 96 // group_size), args)
    assert scales.dtype == torch.bfloat16
    assert scales.shape == (23, 96 // group_size)
    assert (zeros is None) == symmetric
    assert found.isfinite().all()
    assert (found <= usual * (1 + 1e-5) + 1e-60).all()
    if group_size > 3:
        assert found.sum() < usual.sum()


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_four_bits_lose_hardly_more_than_with_the_best_of_very_many_scales(symmetric: bool) -> None:
    torch.manual_seed(5)
    weight, importance = torch.randn(16, 64), torch.rand(64) + 0.05
    args = make_args(4, "int", symmetric, 32)

    scales, zeros = search_scales(weight, importance, IntegerCodes(4), 32, symmetric, torch.bfloat16)

    best = torch.full((16, 2), torch.inf, dtype=torch.float64)
    reach = weight.view(16, 2, 32).abs().amax(-1)
    for zero in [0] if symmetric else range(-8, 8):
        for ratio in torch.linspace(-0.3, 0.3, 301).tolist():
            if ratio:
                trial = losses(weight, importance, reach * ratio, torch.full((16, 2), zero), args)
                best = torch.minimum(best, trial)
    assert losses(weight, importance, scales, zeros, args).sum() <= 1.02 * best.sum()


def test_a_larger_weight_of_either_sign_gets_the_code_that_reaches_further() -> None:
    """-8 times the scale, which is then positive for a negative weight, and negative for a positive one."""
    weight = torch.zeros(2, 4)
    weight[:, 2] = torch.tensor([-1.0, 1.0])
    weight[:, 0] = torch.tensor([0.875, -0.875])

    scales, _ = search_scales(weight, None, IntegerCodes(4), 4, True, torch.bfloat16)

    assert scales.tolist() == [[0.125], [-0.125]]
    assert losses(weight, torch.ones(4), scales, None, make_args(4, "int", True, 4)).sum() == 0


@pytest.mark.parametrize(("bits", "kind", "symmetric"), FORMATS)
def test_weighing_inputs_makes_the_weighted_error_smaller(bits: int, kind: str, symmetric: bool) -> None:
    torch.manual_seed(7)
    weight, importance = torch.randn(64, 128), torch.randn(128).exp().square()
    args, codes = make_args(bits, kind, symmetric, 64), make_codes(bits, kind)

    plain = search_scales(weight, None, codes, 64, symmetric, torch.bfloat16)
    weighted = search_scales(weight, importance, codes, 64, symmetric, torch.bfloat16)

    assert losses(weight, importance, *weighted, args).sum() < 0.97 * losses(weight, importance, *plain, args).sum()


@pytest.mark.parametrize("importance", [torch.zeros(96), torch.eye(96)[0]], ids=["of none", "of one"])
def test_inputs_that_were_never_active_still_get_a_scale(importance: torch.Tensor) -> None:
    weight = ugly_weight()
    args = make_args(4, "int", True, 32)

    scales, zeros = search_scales(weight, importance, IntegerCodes(4), 32, True, torch.bfloat16)

    usual = losses(weight, torch.ones(96), *min_max(weight, args, 3), args)
    assert losses(weight, torch.ones(96), scales, zeros, args)[:, 1:].sum() < usual[:, 1:].sum()


def test_scales_of_float16_do_not_vanish() -> None:
    weight = torch.tensor([[1e-7, -6e-8, 0.0, 6e-8]]).half()

    scales, _ = search_scales(weight, None, IntegerCodes(4), 4, True, torch.float16)

    assert (scales.dtype, scales.isfinite().item(), scales.item() != 0) == (torch.float16, True, True)


@pytest.mark.parametrize("group_size", [32, 256])
@pytest.mark.parametrize("deviation", [0.02, 5e-4, 1e-4])
def test_eight_bits_lose_little_of_float16_weights_however_small(deviation: float, group_size: int) -> None:
    torch.manual_seed(2)
    weight = (torch.randn(64, 256) * deviation).half()

    scales, _ = search_scales(weight, None, IntegerCodes(8), group_size, True, torch.float16)

    rounded = fake_quantize(weight.float(), scales.float(), None, make_args(8, "int", True, group_size))
    assert (rounded - weight).square().mean().sqrt() < 0.01 * deviation


def test_any_number_of_rows_gets_what_each_row_gets_alone() -> None:
    torch.manual_seed(9)
    weight = torch.randn(700, 96)

    together, _ = search_scales(weight, None, IntegerCodes(4), 32, True, torch.bfloat16)
    alone = [search_scales(row, None, IntegerCodes(4), 32, True, torch.bfloat16)[0] for row in weight[::97].split(1)]

    assert torch.equal(together[::97], torch.cat(alone))
