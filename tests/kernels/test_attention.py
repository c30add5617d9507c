"""Paged attention against the reference in float64, for sequences that share nothing but a cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.attention_cases import SEQUENCES, SHAPES, TOLERANCE, Case, fields, make_case
from torch import library

from multilora_kernels import PagedSequences, has_paged_attention, operators, paged_attention, reference


def check(case: Case) -> None:
    actual, expected = run(case), reference.paged_attention(*fields(case, torch.float64))
    assert actual.dtype == case.q.dtype
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def run(case: Case) -> torch.Tensor:
    return paged_attention(case.q, case.keys, case.values, case.sequences)


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_mix_of_sequences(shape, sequences):
    check(make_case(shape, sequences))


@pytest.mark.parametrize("window", [1, 33, 64, 500])
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_every_window(sequences, window):
    check(make_case("default model", sequences, window=window))


@pytest.mark.parametrize("kv_dtype", TOLERANCE)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_dtype_of_queries_and_cache(dtype, kv_dtype):
    check(make_case("odd head_dim", "chunks behind a prefix", dtype, kv_dtype))


def test_large_scores_neither_overflow_nor_lose_the_keys_that_count():
    case = make_case(sequences="long decode")
    check(dataclasses.replace(case, q=case.q * 0))
    case.q.mul_(30)
    actual, expected = run(case), reference.paged_attention(*fields(case, torch.float64))
    torch.testing.assert_close(actual.double(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("sequences", SEQUENCES)
def test_a_sequence_gets_the_same_bits_whoever_shares_the_batch(sequences):
    case = make_case(sequences=sequences)
    together, s = run(case), case.sequences
    for row in range(len(s.context_lens)):
        start, end = s.query_starts[row : row + 2].tolist()
        alone = PagedSequences(
            s.block_tables[row : row + 1], torch.tensor([0, end - start]), s.context_lens[row : row + 1], s.block_size
        )
        assert torch.equal(together[start:end], run(Case(case.q[start:end], case.keys, case.values, alone)))


@pytest.mark.parametrize("sequences", SEQUENCES)
def test_the_number_of_threads_does_not_change_a_bit_of_attention(sequences):
    case, threads, results = make_case(sequences=sequences), torch.get_num_threads(), []
    for n in (1, 2, 5):
        torch.set_num_threads(n)
        results.append(run(case))
    torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_queries_may_be_part_of_a_wider_row():
    case = make_case(sequences="prefill")
    wide = torch.cat((case.q, torch.full_like(case.q, torch.nan)), dim=1)
    assert torch.equal(run(dataclasses.replace(case, q=wide[:, : case.q.shape[1]])), run(case))


def test_a_block_outside_the_cache_is_refused_and_not_read():
    case = make_case()
    case.sequences.block_tables[1, 0] = 1 << 40
    with pytest.raises(RuntimeError, match="block 1099511627776 is none of"):
        run(case)


def test_paged_attention_passes_the_checks_of_torch_for_custom_operators():
    assert has_paged_attention(torch.device("cpu"), is_decode=False)
    arguments = fields(make_case("odd head_dim", "prefill"))
    library.opcheck(operators.paged_attention, arguments, test_utils=("test_schema", "test_faketensor"))
