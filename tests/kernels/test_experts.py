"""route and expert_mlp against loops over tokens and experts, on shapes and batches that kernels get wrong."""

from __future__ import annotations

import math

import pytest
import torch
from support.expert_cases import KINDS, ExpertCase, make_expert_case
from support.lora_cases import STORED

from multilora_kernels import CodeType, route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RTOL, ATOL = 1e-4, 1e-4


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
def test_it_equals_float64_for_any_number_of_tokens(lora_dtype, has_biases, clamp_limit):
    for num_tokens in (1, 2, 11, 150):
        check(
            make_expert_case(
                num_tokens, lora_dtype=lora_dtype, has_biases=has_biases, clamp_limit=clamp_limit, device=DEVICE
            )
        )


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
