"""lora_linear against float64 and, bit for bit, against the base linear and the update one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.lora_cases import CODES, FUSED, MIXED_RANKS, ODD, STORED, Case, make_case
from support.synthetic_batches import POPULARITIES, LinearShape

from multilora_kernels import (
    HugePages,
    PackedWeight,
    linear,
    lora_apply,
    lora_linear,
    packed_linear,
    reference,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RTOL, ATOL = 3e-5, 3e-5
WIDE = LinearShape(in_features=544, slice_sizes=(600, 1, 71))
"""Enough work for several threads, and slices that end inside of a panel."""


def random_weight(shape: LinearShape, dtype: torch.dtype = torch.float32) -> PackedWeight:
    generator = torch.Generator().manual_seed(shape.out_features)
    weight = PackedWeight.empty(shape.out_features, shape.in_features, dtype, CPU, torch.float32, HugePages())
    rows = torch.randn(shape.out_features, shape.in_features, generator=generator) * shape.in_features**-0.5
    weight.copy_rows(0, rows)
    return weight


def make_linear_case(*args, **kwargs) -> Case:
    """As `make_case`, with base tokens that are numbers: the base linear computes them too."""
    case = make_case(*args, **kwargs)
    case.x[:] = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(1))
    return case


def fused(case: Case, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return lora_linear(case.x, weight, case.tables, 0, case.shape.slice_sizes, case.segments, bias)


def one_after_the_other(case: Case, weight: PackedWeight) -> torch.Tensor:
    y = packed_linear(case.x, weight)
    lora_apply(case.x, y, case.tables, 0, case.shape.slice_sizes, case.segments)
    return y


def expected(case: Case, weight: PackedWeight) -> torch.Tensor:
    x, num_slices = case.x.double(), case.shape.num_slices
    y = x @ weight.rows(0, weight.shape[0]).double().T
    v = reference.lora_shrink(x, case.tables, 0, num_slices, case.segments)
    reference.lora_expand(v, y, case.tables, 0, case.shape.slice_sizes, case.segments)
    return y


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [FUSED, ODD, WIDE, LinearShape(1, (1,)), LinearShape(24, (47, 49))], ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_it_equals_float64_for_every_shape_popularity_and_number_of_threads(shape, popularity):
    weight = random_weight(shape)
    for num_tokens, threads in itertools.product((1, 2, 9, 133), (1, 2, 4)):
        case = make_linear_case(popularity, num_tokens, shape, seed=num_tokens)
        with torch_threads(threads):
            y = fused(case, weight)
        torch.testing.assert_close(y.double(), expected(case, weight), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("lora_dtype", STORED)
@pytest.mark.parametrize("magnitudes", [False, True])
def test_it_equals_float64_for_every_dtype(weight_dtype, lora_dtype, magnitudes):
    case = make_linear_case("zipf", 37, ODD, lora_dtype=lora_dtype, magnitudes=magnitudes)
    weight = random_weight(ODD, weight_dtype)
    torch.testing.assert_close(fused(case, weight).double(), expected(case, weight), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("ranks", [MIXED_RANKS, (16,), (0, 3), (0,), (64, 256)])
@pytest.mark.parametrize("shared_a", [False, True])
@pytest.mark.parametrize("lora_dtype", [torch.float32, *CODES])
def test_it_has_the_bits_of_the_base_linear_and_the_update_one_after_the_other(ranks, shared_a, lora_dtype):
    weight = random_weight(WIDE)
    for num_tokens, threads in itertools.product((1, 16, 70), (1, 2, 4)):
        case = make_linear_case("uniform", num_tokens, WIDE, ranks, lora_dtype, shared_a=shared_a, magnitudes=True)
        with torch_threads(threads):
            y = fused(case, weight)
        assert y.equal(one_after_the_other(case, weight))


@pytest.mark.parametrize("shape", [ODD, WIDE], ids=str)
@pytest.mark.parametrize("lora_dtype", [torch.bfloat16, *CODES])
def test_a_token_gets_the_same_bits_whoever_else_is_in_the_batch_and_however_many_threads(shape, lora_dtype):
    case, weight = make_linear_case("zipf", 40, shape, lora_dtype=lora_dtype), random_weight(shape)
    together = fused(case, weight)
    for tokens, threads in itertools.product(([0], [39], range(3, 40, 5)), (1, 2, 4)):
        some = torch.tensor(tokens)
        with torch_threads(threads):
            assert fused(case.with_mapping(case.mapping[some], some), weight).equal(together[some])


def test_the_same_batch_gives_the_same_bits_every_time():
    case, weight = make_linear_case("distinct", 16, WIDE, (16,), lora_dtype=torch.bfloat16), random_weight(WIDE)
    first = fused(case, weight)
    with torch_threads(4):
        assert all(fused(case, weight).equal(first) for _ in range(200))


@pytest.mark.parametrize("magnitudes", [False, True])
def test_the_bias_comes_last(magnitudes):
    case, weight = make_linear_case("uniform", 9, WIDE, magnitudes=magnitudes), random_weight(WIDE)
    bias = torch.randn(WIDE.out_features)
    assert fused(case, weight, bias).equal(fused(case, weight) + bias)


def test_tokens_without_an_adapter_and_absent_slices_have_the_bits_of_the_base_linear():
    case, weight = make_linear_case("uniform", 37, FUSED, ranks=(4, 0, 0), magnitudes=True), random_weight(FUSED)
    y, base = fused(case, weight), packed_linear(case.x, weight)
    for ours, plain, touched in zip(
        y.split(FUSED.slice_sizes, dim=1), base.split(FUSED.slice_sizes, dim=1), case.touched(), strict=True
    ):
        assert ours[~touched].equal(plain[~touched])
        assert not ours[touched].equal(plain[touched])


def test_a_batch_without_any_adapter_or_without_a_token_is_the_base_linear():
    case, weight = make_linear_case("uniform", 5, WIDE), random_weight(WIDE)
    nobody = torch.full_like(case.mapping, -1)
    assert fused(case.with_mapping(nobody, torch.arange(5)), weight).equal(packed_linear(case.x, weight))
    empty = torch.arange(0)
    assert fused(case.with_mapping(case.mapping[empty], empty), weight).shape == (0, WIDE.out_features)


def test_slices_further_on_in_the_tables_belong_to_later_linears():
    case, weight = make_linear_case("uniform", 9, FUSED), random_weight(LinearShape(72, (24, 24)))
    y = lora_linear(case.x, weight, case.tables, 1, (24, 24), case.segments)
    separate = packed_linear(case.x, weight)
    lora_apply(case.x, separate, case.tables, 1, (24, 24), case.segments)
    assert y.equal(separate)


def test_plain_weights_are_multiplied_by_torch(monkeypatch):
    monkeypatch.setattr(linear, "panel_shape", lambda: None)
    case, weight, bias = make_linear_case("uniform", 9, FUSED), random_weight(FUSED), torch.randn(FUSED.out_features)
    assert not weight.is_packed
    y = fused(case, weight, bias)
    torch.testing.assert_close(y.double(), expected(case, weight) + bias, rtol=RTOL, atol=ATOL)


def test_weights_outside_the_arena_are_refused_and_not_read():
    case, weight = make_linear_case("distinct", 16, WIDE, (16,), base_share=0), random_weight(WIDE)
    for offsets in (case.tables.a_offset, case.tables.b_offset):
        kept = offsets.clone()
        offsets[-1] = case.tables.arena.numel()
        with torch_threads(4), pytest.raises(RuntimeError, match="outside the arena"):
            fused(case, weight)
        offsets.copy_(kept)


def test_what_does_not_fit_is_refused():
    case, weight = make_linear_case("uniform", 3, FUSED), random_weight(FUSED)
    with pytest.raises(RuntimeError, match="bias must be float32"):
        fused(case, weight, torch.zeros(3))
    with pytest.raises(RuntimeError, match="do not hold 33"):
        lora_linear(case.x, weight, case.tables, 0, (33,), case.segments)
