"""lora_shrink against the reference in float64, on shapes that kernels get wrong."""

from __future__ import annotations

import pytest
import torch
from support.lora_cases import CODES, FUSED, ODD, STORED, TOLERANCES, Case, make_case
from support.synthetic_batches import POPULARITIES, LinearShape

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def _shrink(implementation, case: Case) -> torch.Tensor:
    on_device = implementation.place(case)
    v = implementation.lora_shrink(on_device.x, on_device.tables, 0, case.shape.num_slices, on_device.segments)
    return v.sum(0).cpu()


def _defined(case: Case) -> torch.Tensor:
    """[num_slices, num_tokens, max_rank]: which elements of v mean anything."""
    rank = case.tables.rank[case.mapping.clamp(min=0)].T.unsqueeze(2)
    return case.touched().unsqueeze(2) & (torch.arange(case.tables.max_rank) < rank)


def _assert_right(implementation, case: Case) -> None:
    v, defined = _shrink(implementation, case), _defined(case)
    assert v.dtype == torch.float32
    assert v.shape == defined.shape
    rtol, atol = TOLERANCES[torch.float32]
    torch.testing.assert_close(v[defined].double(), case.expected_v()[0][defined], rtol=rtol, atol=atol)


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 10, 133])
def test_it_equals_the_reference_for_every_popularity(implementation, popularity, num_tokens):
    _assert_right(implementation, make_case(popularity, num_tokens, seed=num_tokens))


@pytest.mark.parametrize("rank", [1, 3, 8, 17, 64, 256])
def test_it_equals_the_reference_for_every_rank(implementation, rank):
    _assert_right(implementation, make_case("uniform", 21, ODD, ranks=(rank, rank, 0), seed=rank))


@pytest.mark.parametrize("in_features", [1, 7, 8, 15, 31, 65, 577, 2048])
def test_it_equals_the_reference_for_every_hidden_size(implementation, in_features):
    _assert_right(implementation, make_case("uniform", 9, LinearShape(in_features, (8,)), seed=in_features))


@pytest.mark.parametrize("rank", [1, 5, 64])
@pytest.mark.parametrize("in_features", [1, 15, 33, 256, 577])
@pytest.mark.parametrize("lora_dtype", CODES)
def test_codes_equal_the_reference_for_every_rank_and_hidden_size(implementation, rank, in_features, lora_dtype):
    shape = LinearShape(in_features, (8,))
    _assert_right(implementation, make_case("uniform", 9, shape, (rank,), lora_dtype, seed=in_features))


@pytest.mark.parametrize("lora_dtype", STORED)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_it_equals_the_reference_for_every_dtype(implementation, lora_dtype, dtype):
    _assert_right(implementation, make_case("zipf", 37, ODD, lora_dtype=lora_dtype, dtype=dtype))


def test_slices_that_share_one_a_get_the_same_v(implementation):
    case = make_case("uniform", 37, FUSED, lora_dtype=torch.bfloat16, shared_a=True)
    _assert_right(implementation, case)
    v, defined = _shrink(implementation, case), _defined(case)
    assert torch.equal(v[0][defined[0]], v[2][defined[2]])


def test_activations_may_be_rows_of_a_wider_tensor(implementation):
    case = make_case("zipf", 10)
    wide = torch.full((10, case.x.shape[1] + 13), torch.nan)
    wide[:, : case.x.shape[1]] = case.x
    strided = Case(case.shape, case.tables, case.mapping, case.segments, wide[:, : case.x.shape[1]], case.y)
    assert torch.equal(_shrink(implementation, strided)[_defined(case)], _shrink(implementation, case)[_defined(case)])


def test_a_batch_of_base_tokens_costs_no_work(implementation):
    case = make_case("uniform", 7, base_share=1.0)
    assert _shrink(implementation, case).shape == (case.shape.num_slices, 7, case.tables.max_rank)


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_the_same_batch_gives_the_same_bits(implementation, popularity):
    case = make_case(popularity, 133, ODD, lora_dtype=torch.bfloat16)
    first, second, defined = _shrink(implementation, case), _shrink(implementation, case), _defined(case)
    assert torch.equal(first[defined], second[defined])


@pytest.mark.parametrize("lora_dtype", [torch.bfloat16, *CODES])
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_a_token_gets_the_same_bits_whoever_else_is_in_the_batch(implementation, popularity, lora_dtype):
    case = make_case(popularity, 40, LinearShape(300, (24, 8)), lora_dtype=lora_dtype)
    together, defined = _shrink(implementation, case), _defined(case)
    for tokens in (torch.tensor([0]), torch.tensor([39]), torch.arange(3, 40, 5)):
        alone = _shrink(implementation, case.with_mapping(case.mapping[tokens], tokens))
        assert torch.equal(alone[defined[:, tokens]], together[:, tokens][defined[:, tokens]])
