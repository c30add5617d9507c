"""Paged attention against the reference in float64, for sequences that share nothing but a cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import library

from multilora_kernels import PagedSequences, has_paged_attention, operators, paged_attention, reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""By the type of the queries and of the result; the values are of order one."""

# (heads, key-value heads, head_dim, block_size)
SHAPES = {
    "default model": (9, 3, 64, 16),
    "llama": (8, 2, 128, 16),
    "one head": (1, 1, 16, 4),
    "wide group": (71, 1, 8, 5),
    "odd head_dim": (6, 2, 10, 7),
    "no vector's multiple": (5, 5, 90, 1),
}
# (tokens of the step, keys)
SEQUENCES = {
    "decode": [(1, 1), (1, 64), (1, 65), (1, 3), (1, 130)],
    "long decode": [(1, 900), (1, 256), (1, 257)],
    "prefill": [(70, 70), (1, 5), (2, 2)],
    "chunks behind a prefix": [(1, 40), (9, 140), (130, 200), (3, 300)],
}


@dataclasses.dataclass(frozen=True)
class Case:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sequences: PagedSequences


def make_case(
    shape="default model", sequences="decode", dtype=torch.float32, kv_dtype=None, window=None, seed=0
) -> Case:
    """Slots that no token may read are NaN, and blocks behind a sequence's last one are far outside the cache."""
    num_heads, num_kv_heads, head_dim, block_size = SHAPES[shape]
    lengths = SEQUENCES[sequences]
    generator = torch.Generator().manual_seed(0)
    num_blocks = [-(-context // block_size) for _, context in lengths]
    free = (torch.randperm(sum(num_blocks) + 2, generator=generator)).tolist()
    tables = torch.full((len(lengths), max(num_blocks) + 1), 1 << 40)
    cache = torch.full((2, len(free) * block_size, num_kv_heads, head_dim), torch.nan)
    for row, (num_tokens, context) in enumerate(lengths):
        tables[row, : num_blocks[row]] = torch.tensor([free.pop() for _ in range(num_blocks[row])])
        seen = torch.arange(max(0, context - num_tokens - window + 1) if window else 0, context)
        slots = tables[row, seen // block_size] * block_size + seen % block_size
        cache[:, slots] = torch.randn(2, len(seen), num_kv_heads, head_dim, generator=generator)
    starts = torch.tensor([0, *(num_tokens for num_tokens, _ in lengths)]).cumsum(0)
    q = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator) * 2
    contexts = torch.tensor([context for _, context in lengths])
    keys, values = cache.to(kv_dtype or dtype)
    return Case(q.to(dtype), keys, values, PagedSequences(tables, starts, contexts, block_size, window))


def fields(case: Case, dtype: torch.dtype | None = None) -> tuple[object, ...]:
    s = case.sequences
    tensors = (tensor.to(dtype or tensor.dtype) for tensor in (case.q, case.keys, case.values))
    scale = case.q.shape[2] ** -0.5
    return *tensors, s.block_tables, s.query_starts, s.context_lens, s.block_size, s.window or 0, scale


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
    assert has_paged_attention(torch.device("cpu"))
    arguments = fields(make_case("odd head_dim", "prefill"))
    library.opcheck(operators.paged_attention, arguments, test_utils=("test_schema", "test_faketensor"))
