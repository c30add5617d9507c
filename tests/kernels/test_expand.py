"""lora_expand against the reference in float64, on shapes that kernels get wrong."""

from __future__ import annotations

import pytest
import torch
from support.lora_cases import CODES, FUSED, MIXED_RANKS, ODD, STORED, TOLERANCES, Case, make_case
from support.synthetic_batches import POPULARITIES, LinearShape

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def _v(case: Case) -> torch.Tensor:
    """Random v, NaN wherever `lora_shrink` leaves it undefined."""
    generator = torch.Generator().manual_seed(7)
    v = torch.randn(1, case.shape.num_slices, len(case.mapping), case.tables.max_rank, generator=generator)
    rank = case.tables.rank[case.mapping.clamp(min=0)].T.unsqueeze(2)
    v[:, ~(case.touched().unsqueeze(2) & (torch.arange(case.tables.max_rank) < rank))] = torch.nan
    return v


def _expand(implementation, case: Case, v: torch.Tensor) -> torch.Tensor:
    on_device = implementation.place(case)
    y = on_device.y.clone()
    implementation.lora_expand(
        v.to(implementation.device), y, on_device.tables, 0, case.shape.slice_sizes, on_device.segments
    )
    return y.cpu()


def _assert_right(implementation, case: Case) -> None:
    v = _v(case)
    y, expected = _expand(implementation, case, v), case.expected_y(v)
    assert y.dtype == case.y.dtype
    rtol, atol = TOLERANCES[case.y.dtype]
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 10, 133])
def test_it_equals_the_reference_for_every_popularity(implementation, popularity, num_tokens):
    _assert_right(implementation, make_case(popularity, num_tokens, seed=num_tokens))


@pytest.mark.parametrize("rank", [1, 3, 8, 17, 64, 256])
def test_it_equals_the_reference_for_every_rank(implementation, rank):
    _assert_right(implementation, make_case("uniform", 21, ODD, ranks=(rank, rank, 0), seed=rank))


@pytest.mark.parametrize("slice_sizes", [(1,), (7, 9), (15, 17), (31, 8, 8), (577,), (64, 640)])
def test_it_equals_the_reference_for_every_slice_width(implementation, slice_sizes):
    _assert_right(implementation, make_case("uniform", 9, LinearShape(24, slice_sizes)))


@pytest.mark.parametrize("rank", [1, 5, 8, 16, 33, 64])
@pytest.mark.parametrize("lora_dtype", CODES)
def test_codes_equal_the_reference_for_every_rank_and_slice_width(implementation, rank, lora_dtype):
    shape = LinearShape(24, (1, 7, 33, 16))
    _assert_right(implementation, make_case("uniform", 9, shape, (rank,), lora_dtype, magnitudes=True))


@pytest.mark.parametrize("lora_dtype", STORED)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_it_equals_the_reference_for_every_dtype(implementation, lora_dtype, dtype):
    _assert_right(implementation, make_case("zipf", 37, ODD, lora_dtype=lora_dtype, dtype=dtype))


@pytest.mark.parametrize("lora_dtype", STORED)
def test_a_dora_magnitude_scales_the_base_output_and_the_update(implementation, lora_dtype):
    case = make_case("uniform", 37, ODD, lora_dtype=lora_dtype, magnitudes=True)
    assert bool((case.tables.magnitude_offset[case.tables.rank > 0] >= 0).any())
    _assert_right(implementation, case)


def test_tokens_without_an_adapter_and_absent_slices_keep_their_bits(implementation):
    case = make_case("uniform", 37, FUSED, ranks=(4, 0, 0), dtype=torch.bfloat16, magnitudes=True)
    y = _expand(implementation, case, _v(case))
    for before, after, touched in zip(
        case.y.split(FUSED.slice_sizes, dim=1), y.split(FUSED.slice_sizes, dim=1), case.touched(), strict=True
    ):
        assert torch.equal(before[~touched], after[~touched])
        assert not torch.equal(before[touched], after[touched])


def test_the_output_may_be_columns_of_a_wider_tensor(implementation):
    case = make_case("zipf", 10)
    wide = torch.full((10, case.y.shape[1] + 13), 3.0, device=implementation.device)
    wide[:, : case.y.shape[1]] = case.y.to(implementation.device)
    on_device, v = implementation.place(case), _v(case)
    implementation.lora_expand(
        v.to(implementation.device),
        wide[:, : case.y.shape[1]],
        on_device.tables,
        0,
        case.shape.slice_sizes,
        on_device.segments,
    )
    assert torch.equal(wide[:, : case.y.shape[1]].cpu(), _expand(implementation, case, v))
    assert bool((wide[:, case.y.shape[1] :] == 3).all())


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_the_same_batch_gives_the_same_bits(implementation, popularity):
    case = make_case(popularity, 133, ODD, lora_dtype=torch.bfloat16)
    assert torch.equal(_expand(implementation, case, _v(case)), _expand(implementation, case, _v(case)))


@pytest.mark.parametrize("lora_dtype", [torch.bfloat16, *CODES])
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_a_token_gets_the_same_bits_whoever_else_is_in_the_batch(implementation, popularity, lora_dtype):
    case = make_case(popularity, 40, ODD, ranks=(*MIXED_RANKS, 16), lora_dtype=lora_dtype, magnitudes=True)
    v = _v(case)
    together = _expand(implementation, case, v)
    for tokens in (torch.tensor([0]), torch.tensor([39]), torch.arange(3, 40, 5)):
        alone = _expand(implementation, case.with_mapping(case.mapping[tokens], tokens), v[:, :, tokens].contiguous())
        assert torch.equal(alone, together[tokens])
