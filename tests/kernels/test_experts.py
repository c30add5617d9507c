"""route and expert_mlp against loops over tokens and experts, on shapes and batches that kernels get wrong."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expert_cases import KINDS, ExpertCase, make_expert_case
from support.lora_cases import STORED

from multilora_kernels import CodeType, packed_linear, quantized_linear, route, silu_mul
from multilora_kernels.cpu import compiled_kernels
from multilora_kernels.interpreter import IS_INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RTOL, ATOL = 1e-4, 1e-4
ON_A_CPU = pytest.mark.skipif(DEVICE == "cuda" or IS_INTERPRETED, reason="the compiled operators of a CPU")
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(case: ExpertCase, tolerance: float = RTOL) -> None:
    torch.testing.assert_close(case.result().cpu().double(), case.expected(), rtol=tolerance, atol=tolerance)


def routed_plainly(logits: torch.Tensor, top_k: int, is_normalised: bool) -> tuple[list[list[int]], torch.Tensor]:
    ids, weights = [], []
    for row in logits.double().cpu().tolist():
        largest = max(row)
        exponentials = [math.exp(value - largest) for value in row]
        chosen = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:top_k]
        shares = [exponentials[expert] / sum(exponentials) for expert in chosen]
        ids.append(chosen)
        weights.append([share / sum(shares) for share in shares] if is_normalised else shares)
    return ids, torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (7, 3), (60, 4), (64, 8), (128, 8), (5, 5)])
def test_the_experts_of_the_largest_logits_are_chosen_and_of_equal_ones_the_lower(num_experts, top_k, is_normalised):
    for num_tokens in (1, 3, 70):
        generator = torch.Generator().manual_seed(num_tokens)
        logits = torch.randn(num_tokens, num_experts, generator=generator) * 4
        logits[::2] = logits[::2].round()  # ties
        logits[-1] = 0
        ids, weights = route(logits.to(DEVICE), top_k, is_normalised)
        expected_ids, expected = routed_plainly(logits, top_k, is_normalised)
        assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        assert ids.tolist() == expected_ids
        torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=1e-7)


def test_large_and_infinite_logits_are_chosen_without_overflow():
    logits = torch.tensor([[1e30, -1e30, 1e30, 0.0], [-torch.inf, 2.0, 1.0, -torch.inf]]).to(DEVICE)
    ids, weights = route(logits, 3, is_normalised=True)
    assert ids.tolist() == [[0, 2, 3], [1, 2, 0]]
    torch.testing.assert_close(weights.cpu()[0], torch.tensor([0.5, 0.5, 0.0]))
    assert weights.cpu()[1, 2] == 0


def test_logits_that_are_no_numbers_name_experts_that_exist():
    ids, weights = route(torch.full((2, 6), torch.nan).to(DEVICE), 3, is_normalised=False)
    assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in ids.tolist())
    assert weights.isnan().all()


@pytest.mark.parametrize("clamp_limit", [0.0, 0.8])
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("lora_dtype", [None, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 2, 11, 150])
def test_it_equals_float64_for_any_number_of_tokens(num_tokens, lora_dtype, has_biases, clamp_limit):
    options = {"has_biases": has_biases, "clamp_limit": clamp_limit}
    check(make_expert_case(num_tokens, lora_dtype=lora_dtype, **options, device=DEVICE))


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (8, 24, 3, 3), (96, 50, 130, 8), (31, 64, 4, 1), (300, 7, 5, 2)], ids=str
)
def test_it_equals_float64_for_every_shape(sizes):
    for num_tokens in (1, 9):
        check(make_expert_case(num_tokens, *sizes, has_biases=True, device=DEVICE))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lora_dtype", STORED)
def test_it_equals_float64_for_every_dtype(weight_dtype, lora_dtype):
    check(make_expert_case(weight_dtype=weight_dtype, lora_dtype=lora_dtype, device=DEVICE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [32, 24, 1000])
def test_it_equals_float64_for_every_kind_of_codes(kind, group_size):
    for num_tokens in (1, 40):
        check(make_expert_case(num_tokens, kind=kind, group_size=group_size, has_biases=True, device=DEVICE), 5e-4)


@pytest.mark.parametrize("kind", [None, KINDS[0], KINDS[3], KINDS[4]])
def test_activations_of_16_bits_are_rounded_once_between_two_products(kind):
    case = make_expert_case(
        20, kind=kind, dtype=torch.float16, weight_dtype=torch.float16, lora_dtype=torch.float16, device=DEVICE
    )
    assert case.result().dtype == torch.float16
    check(case, 1e-2)


def test_tokens_without_an_adapter_have_the_bits_of_the_base_model():
    case = make_expert_case(40, device=DEVICE)
    base = case.lora.mapping < 0
    plain = make_expert_case(40, lora_dtype=None, device=DEVICE)
    assert case.result()[base].equal(plain.result()[base])
    assert not case.result()[~base].equal(plain.result()[~base])


def test_a_batch_without_a_token_is_empty():
    assert make_expert_case(0, device=DEVICE).result().shape == (0, 77)


def test_float64_stays_float64():
    case = make_expert_case(dtype=torch.float64, weight_dtype=torch.float64, lora_dtype=torch.float64, has_biases=True)
    torch.testing.assert_close(case.result(), case.expected(), rtol=1e-12, atol=1e-12)
    logits = torch.randn(5, 7, dtype=torch.float64)
    _, weights = route(logits, 3, is_normalised=True)
    torch.testing.assert_close(weights, routed_plainly(logits, 3, True)[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_has_its_own_rows_in_the_memory_of_all(kind):
    """The memory of zeros is made when the first one comes that differs, in any expert."""
    gate_up = make_expert_case(kind=kind, device=DEVICE).gate_up
    before = [gate_up.expert(e).rows(0, 66) for e in range(7)]
    scales = torch.ones(4, gate_up.weight.num_groups, device=DEVICE)
    zeros = None if kind[0] is CodeType.FP8 else torch.zeros_like(scales, dtype=torch.uint8)
    filled = gate_up.expert(3)
    filled.copy_rows(60, torch.ones(4, 77, dtype=torch.uint8, device=DEVICE), scales, zeros)
    for e in range(7):
        after = gate_up.expert(e).rows(0, 66)
        if e == 3:
            assert after.equal(filled.rows(0, 66))
            assert not after[60:64].equal(before[e][60:64])
            after[60:64] = before[e][60:64]
        assert after.equal(before[e])
    assert (gate_up.shape, filled.shape) == ((7, 66, 77), (66, 77))
    assert gate_up.nbytes >= 7 * 66 * 77 * kind[0].bits / 8


SEVERAL_THREADS = {"hidden": 300, "inner": 100, "num_experts": 8}
"""Sizes of enough work for several threads."""


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@functools.cache
def batch_of_any(kind, may_round: bool) -> tuple[ExpertCase, torch.Tensor]:
    options = {"may_round": may_round, "compute_dtype": torch.bfloat16 if may_round else torch.float32}
    dtypes = {"weight_dtype": torch.bfloat16, "lora_dtype": torch.bfloat16}
    case = make_expert_case(90, **SEVERAL_THREADS, **options, **dtypes, kind=kind, has_biases=True, shared_a=True)
    return case, case.result()


@ON_A_CPU
@given(
    st.lists(st.integers(0, 89), min_size=1, max_size=60),
    st.sampled_from([None, *KINDS]),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
)
@settings(deadline=None, max_examples=60)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(tokens, kind, may_round, threads):
    case, together = batch_of_any(kind, may_round)
    with torch_threads(threads):
        assert case.of(torch.tensor(tokens)).result().equal(together[tokens])


@ON_A_CPU
def test_the_same_batch_has_the_same_bits_every_time():
    case = make_expert_case(16, **SEVERAL_THREADS, lora_dtype=torch.bfloat16, weight_dtype=torch.bfloat16)
    first = case.result()
    with torch_threads(4):
        assert all(case.result().equal(first) for _ in range(200))


@ON_A_CPU
def test_a_prompt_of_several_tiles_has_the_bits_of_its_tokens():
    case = make_expert_case(6000, 1500, 8, 8, 8, num_loras=2, ranks=(2,))
    some = torch.arange(0, 6000, 700)
    assert case.of(some).result().equal(case.result()[some])


@ON_A_CPU
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_it_has_the_bits_of_the_linears_of_each_expert(kind, compute_dtype):
    """packed_linear or quantized_linear, silu_mul and the sum: activations are rounded there and here alike."""
    may_round = compute_dtype == torch.bfloat16
    options = {"may_round": may_round, "compute_dtype": compute_dtype, "weight_dtype": torch.bfloat16}
    case = make_expert_case(20, **SEVERAL_THREADS, **options, kind=kind, lora_dtype=None)
    linear = packed_linear if kind is None else quantized_linear
    expected = torch.zeros(20, 300)
    for token, place in itertools.product(range(20), range(case.expert_ids.shape[1])):
        expert = int(case.expert_ids[token, place])
        h = silu_mul(linear(case.x[token : token + 1], case.gate_up.expert(expert)))
        expected[token] += case.weights[token, place] * linear(h, case.down.expert(expert))[0]
    assert case.result().equal(expected)


@ON_A_CPU
def test_what_does_not_exist_is_refused_and_not_read():
    case = make_expert_case(5, **SEVERAL_THREADS)
    for expert in (-1, 8):
        case.expert_ids[3, 1] = expert
        with pytest.raises(IndexError, match=f"expert {expert} is none of 8"):
            case.result()
    case = make_expert_case(5)
    for lora_index in (-2, 3):
        case.lora.mapping[2] = lora_index
        with pytest.raises(IndexError, match=f"adapter {lora_index} is none of 3"):
            case.result()
    case = make_expert_case(40, **SEVERAL_THREADS, ranks=(5,))
    for offsets in (case.lora.tables.a_offset, case.lora.tables.b_offset):
        kept = offsets.clone()
        offsets[:] = case.lora.tables.arena.numel()
        with torch_threads(4), pytest.raises(RuntimeError, match="outside the arena"):
            case.result()
        offsets.copy_(kept)
    with pytest.raises(IndexError, match=r"columns 21 .. 29 are not all among 28"):
        replace(case, lora=case.lora._replace(down_column=21)).result()


@ON_A_CPU
def test_what_does_not_fit_is_refused():
    case = make_expert_case(5, has_biases=True)
    for changed, message in (
        ({"x": case.x[:, 1:]}, r"x must be float32 \[num_tokens, 77\]"),
        ({"expert_ids": case.expert_ids.long()}, "expert_ids and weights must be int32 and float32"),
        ({"expert_ids": case.expert_ids.T.contiguous().T}, "must be contiguous"),
        ({"weights": case.weights[:, 1:]}, "expert_ids and weights must be"),
        ({"gate_up_bias": case.gate_up_bias[1:]}, r"a bias must be float32 \[7, 66\]"),
        ({"down": case.gate_up}, "7 gates and ups of 66 outputs do not fit 7 of 77 inputs"),
        ({"lora": case.lora._replace(mapping=case.lora.mapping.int())}, r"the mapping must be contiguous int64 \[5\]"),
    ):
        with pytest.raises(RuntimeError, match=message):
            replace(case, **changed).result()
    with pytest.raises(RuntimeError, match="panels do not hold 5 experts"):
        compiled_kernels().expert_mlp(
            case.x,
            case.expert_ids,
            case.weights,
            5,
            case.gate_up.panels,
            66,
            case.down.panels,
            77,
            None,
            None,
            0.0,
            None,
        )
    with pytest.raises(RuntimeError, match="logits must be float32"):
        compiled_kernels().route(torch.zeros(3, 2), 3, False)
