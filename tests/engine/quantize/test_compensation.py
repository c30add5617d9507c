"""Rounding with compensation against the method without its algebra, and against rounding to the nearest code."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from support.code_formats import FORMATS, make_args, make_codes, ugly_weight

from multilora_engine.quantize.compensation import activations_of, round_compensated
from multilora_engine.quantize.scales import Codes, IntegerCodes, search_scales


def correlated_inputs(num_tokens: int, num_inputs: int) -> torch.Tensor:
    """float32, of few directions and some noise, as a text's are; one input is never active."""
    generator = torch.Generator().manual_seed(11)
    directions = torch.randn(num_inputs // 4, num_inputs, generator=generator)
    inputs = torch.randn(num_tokens, num_inputs // 4, generator=generator) @ directions
    inputs += 0.3 * torch.randn(num_tokens, num_inputs, generator=generator)
    inputs[:, 5] = 0
    return inputs * torch.rand(num_inputs, generator=generator).exp().square()


def moments_of(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.t() @ inputs / len(inputs)


def nearest(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, codes: Codes, group_size: int
) -> torch.Tensor:
    scale = scales.float().repeat_interleave(group_size, 1)
    zero = torch.zeros_like(scale) if zeros is None else zeros.repeat_interleave(group_size, 1)
    return (codes.nearest(weight / scale + zero) - zero) * scale


def eliminate(
    weight: torch.Tensor,
    moments: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    codes: Codes,
    group_size: int,
) -> torch.Tensor:
    """The method as it is derived: after each input the inverse loses that input's row and column; in float64."""
    squares = moments.diagonal().double()
    damped = (moments.double() + squares.diag()) / 2 + 0.01 * squares.mean() * torch.eye(len(squares))
    inverse = torch.linalg.inv(damped)
    left, rounded = weight.double().clone(), torch.empty_like(weight)
    for i in squares.argsort(descending=True, stable=True).tolist():
        group = slice(i // group_size, i // group_size + 1)
        zero = None if zeros is None else zeros[:, group]
        rounded[:, i : i + 1] = nearest(left[:, i : i + 1].float(), scales[:, group], zero, codes, 1)
        error = (left[:, i] - rounded[:, i]) / inverse[i, i]
        left -= torch.outer(error, inverse[i])
        inverse -= torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return rounded


@pytest.mark.parametrize(("num_inputs", "group_size"), [(24, 8), (160, 32), (300, 300)])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_it_rounds_as_eliminating_one_input_after_the_other_does(
    num_inputs: int, group_size: int, symmetric: bool
) -> None:
    generator = torch.Generator().manual_seed(4)
    weight, codes = torch.randn(17, num_inputs, generator=generator), IntegerCodes(4)
    moments = moments_of(correlated_inputs(2 * num_inputs, num_inputs))
    found = search_scales(weight, moments.diagonal(), codes, group_size, symmetric, torch.bfloat16)

    rounded = round_compensated(weight, activations_of(moments), codes, *found)

    expected = eliminate(weight, moments, *found, codes, group_size)
    is_same = (rounded == expected).all(1)
    plain = nearest(weight, *found, codes, group_size)
    assert not torch.equal(expected, plain)
    # A value that lies between two codes may fall to either side; then all after it differ.
    assert is_same.sum() >= 15


@pytest.mark.parametrize("num_tokens", [7, 500], ids=["of few tokens", "of many"])
@pytest.mark.parametrize("group_size", [3, 32, 96])
@pytest.mark.parametrize(("bits", "kind", "symmetric"), FORMATS)
def test_no_output_changes_more_than_with_the_nearest_codes(
    bits: int, kind: str, symmetric: bool, group_size: int, num_tokens: int
) -> None:
    weight, inputs, codes = ugly_weight(), correlated_inputs(num_tokens, 96), make_codes(bits, kind)
    moments = moments_of(inputs)
    scales, zeros = search_scales(weight, moments.diagonal(), codes, group_size, symmetric, torch.bfloat16)

    rounded = round_compensated(weight, activations_of(moments), codes, scales, zeros)

    def errors(of: torch.Tensor) -> torch.Tensor:
        return ((of - weight).double() @ inputs.double().t()).square().mean(1)

    found, usual = errors(rounded), errors(nearest(weight, scales, zeros, codes, group_size))
    assert rounded.isfinite().all()
    # Two errors that differ by rounding in float32 alone count as equal.
    assert (found <= usual * (1 + 1e-4) + 1e-12 * weight.abs().amax(1).double()).all()
    assert found.sum() < 0.9 * usual.sum()


@pytest.mark.parametrize(("bits", "kind", "symmetric"), FORMATS)
def test_compressed_tensors_finds_each_rounded_weight_among_its_codes(bits: int, kind: str, symmetric: bool) -> None:
    weight, codes = ugly_weight(), make_codes(bits, kind)
    moments = moments_of(correlated_inputs(300, 96))
    scales, zeros = search_scales(weight, moments.diagonal(), codes, 32, symmetric, torch.bfloat16)

    rounded = round_compensated(weight, activations_of(moments), codes, scales, zeros)

    zero_point = None if zeros is None else zeros.to(torch.int8)
    assert torch.equal(
        fake_quantize(rounded, scales.float(), zero_point, make_args(bits, kind, symmetric, 32)), rounded
    )


def test_a_text_that_moves_no_input_leaves_the_nearest_codes() -> None:
    weight, codes = ugly_weight(), IntegerCodes(4)
    scales, zeros = search_scales(weight, None, codes, 32, True, torch.bfloat16)

    rounded = round_compensated(weight, activations_of(torch.zeros(96, 96)), codes, scales, zeros)

    assert torch.equal(rounded, nearest(weight, scales, zeros, codes, 32))


def test_outputs_change_less_on_tokens_too_that_a_short_text_does_not_have() -> None:
    generator = torch.Generator().manual_seed(8)
    inputs, codes = correlated_inputs(3000, 96), IntegerCodes(4)
    weight, moments = torch.randn(64, 96, generator=generator), moments_of(inputs[:40])
    scales, zeros = search_scales(weight, moments.diagonal(), codes, 32, True, torch.bfloat16)

    rounded = round_compensated(weight, activations_of(moments), codes, scales, zeros)

    def error(of: torch.Tensor) -> float:
        return ((of - weight) @ inputs[40:].t()).square().mean().item()

    assert error(rounded) < 0.8 * error(nearest(weight, scales, zeros, codes, 32))
