"""Paged attention against the reference in float64, for sequences that share nothing but a cache."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from support.attention_cases import OPTIONS, SEQUENCES, SHAPES, TOLERANCE, Case, fields, make_case

from multilora_kernels import (
    AttentionOptions,
    PagedSequences,
    paged_attention,
    reference,
)


def check(case: Case) -> None:
    actual, expected = run(case), reference.paged_attention(*fields(case, torch.float64))
    assert actual.dtype == case.q.dtype
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def run(case: Case) -> torch.Tensor:
    return paged_attention(case.q, case.keys, case.values, case.sequences, case.options)


def may_be_rounded(case: Case) -> Case:
    """The case in bfloat16 arithmetic, if its cache is of that type."""
    return dataclasses.replace(case, options=case.options._replace(may_round=True))


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_mix_of_sequences(shape, sequences):
    check(make_case(shape, sequences))


@pytest.mark.parametrize("window", [1, 33, 64, 500])
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_every_window(sequences, window):
    check(make_case("default model", sequences, window=window))


@pytest.mark.parametrize("options", OPTIONS[1:])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("shape", ["default model", "odd head_dim"])
def test_every_option_in_every_mix_of_sequences(shape, sequences, window, options):
    check(make_case(shape, sequences, window=window, options=options))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_mix_of_sequences_over_codes(shape, sequences, kv_dtype):
    check(make_case(shape, sequences, kv_dtype=kv_dtype))


@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize("options", ["none", "all", "distances"])
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_windows_and_options_over_codes(sequences, options, window):
    check(make_case("default model", sequences, kv_dtype=torch.int8, window=window, options=options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_of_16_bits_over_codes(dtype):
    check(make_case("wide group", "chunks behind a prefix", dtype, torch.int8, options="all"))


@pytest.mark.parametrize("options", ["all", "distances"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_options_beside_queries_and_caches_of_16_bits(dtype, options):
    check(make_case("wide group", "chunks behind a prefix", dtype, options=options))


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_capped_score_is_a_hyperbolic_tangent_of_small_and_of_large_scores(num_tokens):
    size = torch.tensor([1e-6, 1e-3, 0.1, 0.3, 0.5, 1.0, 3.0, 8.0, 30.0, 1e30])
    scores = torch.cat((size, -size))
    # One key has such a score and the value 1, all others have zeros: the output is that key's weight.
    keys, values = torch.zeros(2, 2, len(scores), 1)
    keys[0, :, 0], values[0] = scores, 1
    q = torch.ones(num_tokens, len(scores), 1)
    sequences = PagedSequences(
        torch.tensor([[0]]), torch.tensor([0, num_tokens]), torch.tensor([2]), int(num_tokens == 1), block_size=2
    )
    weights = paged_attention(q, keys, values, sequences, AttentionOptions(scale=1.0, softcap=1.0))[-1]
    torch.testing.assert_close(weights.double().logit(), scores.double().tanh(), atol=6e-7, rtol=6e-7)


def test_an_attention_without_keys_worth_a_weight_gives_next_to_nothing():
    case = make_case(sequences="long decode")
    sinks = torch.full((case.q.shape[1],), 1e4)
    assert run(dataclasses.replace(case, options=AttentionOptions(sinks=sinks))).count_nonzero() == 0
    without = run(dataclasses.replace(case, options=AttentionOptions(sinks=torch.full_like(sinks, -1e4))))
    torch.testing.assert_close(without, run(case), atol=1e-6, rtol=1e-6)


def test_options_that_are_none_are_refused():
    case = make_case()
    with pytest.raises(RuntimeError, match="softcap is not negative, as is -1"):
        run(dataclasses.replace(case, options=AttentionOptions(softcap=-1.0)))
    with pytest.raises(RuntimeError, match=r"sinks are one of each of 9 heads, not \[8\]"):
        run(dataclasses.replace(case, options=AttentionOptions(sinks=torch.zeros(8))))
    with pytest.raises(RuntimeError, match=r"a bias by distance is contiguous \[9, distances\], not \[8, 5\]"):
        run(dataclasses.replace(case, options=AttentionOptions(distance_bias=torch.zeros(8, 5))))
    with pytest.raises(RuntimeError, match="scores with a bias by distance have no softcap, as is 2"):
        run(dataclasses.replace(case, options=AttentionOptions(softcap=2.0, distance_bias=torch.zeros(9, 5))))


@pytest.mark.parametrize("num_distances", [1, 2, 1000])
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_a_bias_by_distance_for_few_and_for_many_distances(sequences, num_distances):
    case = make_case("wide group", sequences, window=33 if num_distances == 2 else None)
    bias = torch.randn(case.q.shape[1], num_distances, generator=torch.Generator().manual_seed(0))
    check(dataclasses.replace(case, options=AttentionOptions(distance_bias=bias)))


def test_a_bias_that_is_the_same_for_all_distances_changes_nothing():
    case = make_case(sequences="chunks behind a prefix")
    bias = torch.full((case.q.shape[1], 1), 3.0)
    biased = run(dataclasses.replace(case, options=AttentionOptions(distance_bias=bias)))
    torch.testing.assert_close(biased, run(case), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(8, 64), (12, 64), (6, 16)])
def test_tokens_of_many_sequences_that_each_attend_to_all_of_a_source(num_heads, head_dim):
    """Cross attention: each token is a decode over the block table of its source."""
    generator = torch.Generator().manual_seed(0)
    lengths, tokens_of, block_size = [64, 1, 17, 64], [1, 3, 1, 2], 16
    owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(tokens_of))
    q = torch.randn(len(owners), num_heads, head_dim, generator=generator)
    cache = torch.full((2, 20 * block_size, num_heads, head_dim), torch.nan)
    tables = torch.randperm(16, generator=generator).view(4, 4)
    sources = torch.randn(2, 4, 64, num_heads, head_dim, generator=generator)
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        slots = tables[row, positions // block_size] * block_size + positions % block_size
        cache[:, slots] = sources[:, row, :length]
    contexts = torch.tensor(lengths)[owners]
    starts = torch.arange(len(owners) + 1)
    sequences = PagedSequences(tables[owners], starts, contexts, len(owners), block_size)
    actual = paged_attention(q, *cache, sequences, AttentionOptions(scale=1.0))
    for token, owner in enumerate(owners.tolist()):
        keys, values = sources[:, owner, : lengths[owner]].double().transpose(1, 2)
        weights = (keys @ q[token].double()[..., None])[..., 0].softmax(-1)
        expected = (weights[:, None] @ values).flatten()
        torch.testing.assert_close(actual[token].double(), expected, atol=1e-5, rtol=1e-5)
        one = PagedSequences(tables[owner][None], starts[:2], contexts[token, None], 1, block_size)
        alone = paged_attention(q[token, None], *cache, one, AttentionOptions(scale=1.0))
        assert torch.equal(alone, actual[token, None])


@pytest.mark.parametrize("kv_dtype", TOLERANCE)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_dtype_of_queries_and_cache(dtype, kv_dtype):
    check(make_case("odd head_dim", "chunks behind a prefix", dtype, kv_dtype))


@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize("options", ["none", "all", "distances"])
@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounded_queries_and_weights_are_within_the_bound_of_bfloat16(shape, sequences, options, window):
    case = may_be_rounded(make_case(shape, sequences, torch.float32, torch.bfloat16, window, options))
    actual, expected = run(case), reference.paged_attention(*fields(case, torch.float64))
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_rounded_weights_of_equal_values_give_that_value():
    case = may_be_rounded(make_case(sequences="prefill", kv_dtype=torch.bfloat16))
    case.values.masked_fill_(~case.values.isnan(), 0.75)
    torch.testing.assert_close(run(case), torch.full((73, 576), 0.75), atol=1e-6, rtol=0)


def test_large_scores_neither_overflow_nor_lose_the_keys_that_count():
    case = make_case(sequences="long decode")
    check(dataclasses.replace(case, q=case.q * 0))
    case.q.mul_(30)
    actual, expected = run(case), reference.paged_attention(*fields(case, torch.float64))
    torch.testing.assert_close(actual.double(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("options", ["none", "all", "distances"])
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_a_sequence_gets_the_same_bits_whoever_shares_the_batch(sequences, options, kv_dtype):
    case = may_be_rounded(make_case(sequences=sequences, kv_dtype=kv_dtype, options=options))
    together, s = run(case), case.sequences
    for row in range(len(s.context_lens)):
        start, end = s.query_starts[row : row + 2].tolist()
        alone = PagedSequences(
            s.block_tables[row : row + 1],
            torch.tensor([0, end - start]),
            s.context_lens[row : row + 1],
            int(row < s.num_decodes),
            s.block_size,
        )
        own = dataclasses.replace(case, q=case.q[start:end], sequences=alone)
        assert torch.equal(together[start:end], run(own))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("options", "window"), [("none", None), ("all", None), ("distances", None), ("none", 33)])
@pytest.mark.parametrize("may_round", [False, True])
def test_a_prompt_has_the_same_bits_however_it_is_cut(may_round, options, window, kv_dtype):
    case = make_case("default model", "chunks behind a prefix", kv_dtype=kv_dtype, window=window, options=options)
    case = may_be_rounded(case) if may_round else case
    s = case.sequences
    row, num_tokens = 2, 130
    start, context = int(s.query_starts[row]), int(s.context_lens[row])
    q, table = case.q[start : start + num_tokens], s.block_tables[row : row + 1]

    def piece(begin: int, end: int) -> torch.Tensor:
        lengths = torch.tensor([context - num_tokens + end])
        sequences = PagedSequences(table, torch.tensor([0, end - begin]), lengths, 0, s.block_size, window)
        return run(dataclasses.replace(case, q=q[begin:end], sequences=sequences))

    whole = piece(0, num_tokens)
    for cuts in ([129], [1, 2, 65], [16, 17, 33, 128], [43, 86]):
        pieces = [piece(begin, end) for begin, end in pairwise([0, *cuts, num_tokens])]
        assert torch.equal(torch.cat(pieces), whole)


def test_sequences_that_are_said_to_decode_and_have_several_tokens_are_refused():
    case = make_case(sequences="prefill")
    with pytest.raises(RuntimeError, match="the first 1 sequences have one token each"):
        run(dataclasses.replace(case, sequences=case.sequences._replace(num_decodes=1)))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("options", ["none", "all", "distances"])
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_the_number_of_threads_does_not_change_a_bit_of_attention(sequences, options, kv_dtype):
    case = may_be_rounded(make_case(sequences=sequences, kv_dtype=kv_dtype, options=options))
    threads, results = torch.get_num_threads(), []
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
