"""What only the GPU operators promise; collected on a GPU and in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from support import attention_cases
from support.attention_cases import OPTIONS, SHAPES
from support.lora_cases import CODES, FUSED, ODD, TOLERANCES, Case, make_case
from support.synthetic_batches import reference_order

from benchmarks.lora_workloads import LinearShape
from multilora_kernels import cuda, load_rows, lora_segments, parts, reference, step_inputs_reference
from multilora_kernels.cuda import decode_attention, expand, prompt_attention, segments
from multilora_kernels.kv_rows import SCALE_BYTES, KVCodes, quantize_rows
from multilora_kernels.segments import capacity_of, reference_segments, rows_of
from multilora_kernels.step_inputs import StepInputs

_LONG = LinearShape(in_features=2500, slice_sizes=(40, 24))


def _run(implementation, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    on_device = implementation.place(case)
    v = implementation.lora_shrink(on_device.x, on_device.tables, 0, case.shape.num_slices, on_device.segments)
    y = on_device.y.clone()
    implementation.lora_expand(v, y, on_device.tables, 0, case.shape.slice_sizes, on_device.segments)
    return v, y.cpu()


def test_the_parts_of_a_long_sum_are_added_by_expand(implementation):
    case = make_case("zipf", 12, _LONG, ranks=(8, 0, 20))
    v, y = _run(implementation, case)
    assert v.shape[0] == 3
    rtol, atol = TOLERANCES[torch.float32]
    torch.testing.assert_close(y.double(), case.expected_y(case.expected_v()), rtol=rtol, atol=atol)


def test_prefill_chunks_give_the_same_result_from_one_part(implementation, monkeypatch):
    case = make_case("skewed", 70, _LONG, ranks=(8, 0, 20))
    chunks = lora_segments(case.mapping, case.tables.rank.shape[0], chunk_size=64)
    monkeypatch.setattr(parts, "MAX_SPLIT_TOKENS", 69)
    v, y = _run(implementation, Case(case.shape, case.tables, case.mapping, chunks, case.x, case.y))
    assert v.shape[0] == 1
    rtol, atol = TOLERANCES[torch.float32]
    torch.testing.assert_close(y.double(), case.expected_y(case.expected_v()), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("lora_dtype", "dtype", "chunk_size"), [(torch.bfloat16, torch.bfloat16, 64), (torch.int8, torch.float32, 16)]
)
def test_a_program_that_takes_several_blocks_of_outputs_gives_the_bits_of_programs_of_one(
    implementation, monkeypatch, lora_dtype, dtype, chunk_size
):
    shape = LinearShape(in_features=40, slice_sizes=(577, 17))
    case = make_case("zipf", 20, shape, (16, 3, 0, 70), lora_dtype, dtype, magnitudes=True)
    case = replace(case, segments=lora_segments(case.mapping, len(case.tables.rank), chunk_size))
    _, of_one = _run(implementation, case)
    monkeypatch.setattr(expand, "_PROGRAMS", 1)
    _, of_several = _run(implementation, case)
    assert torch.equal(of_several, of_one)
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(of_several.double(), case.expected_y(case.expected_v()), rtol=rtol, atol=atol)


def _check_attention(implementation, case: attention_cases.Case) -> None:
    actual = implementation.paged_attention(*attention_cases.fields(implementation.caches_of(case)))
    expected = reference.paged_attention(*attention_cases.fields(case, torch.float64))
    assert actual.dtype == case.q.dtype
    tolerance = attention_cases.TOLERANCE[case.q.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def _check_step(implementation, case: attention_cases.Case, rotary_dim=None, is_interleaved=False) -> None:
    """Rotation, cache and attention; slots that nothing writes stay NaN."""
    exact = attention_cases.make_rotary_step(case, case.q.dtype, rotary_dim).copied(torch.float64)
    on_device = implementation.caches_of(case)
    step = attention_cases.make_rotary_step(on_device, case.q.dtype, rotary_dim)
    ours = [attention_cases.moved(x, implementation.device) for x in step.copied()]
    actual = implementation.rotary_attention(*ours, *attention_cases.sequence_fields(on_device), is_interleaved)
    expected = reference.rotary_attention(*exact, *attention_cases.sequence_fields(case), is_interleaved)
    assert actual.dtype == case.q.dtype
    tolerance = max(attention_cases.TOLERANCE.get(dtype, 2e-2) for dtype in (case.q.dtype, case.keys.dtype))
    torch.testing.assert_close(actual.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    for cache, expected_cache in zip(ours[3:5], exact[3:5], strict=True):
        places = torch.arange(len(cache))
        found, wanted = (
            load_rows(attention_cases.moved(x, "cpu"), places, torch.float64) for x in (cache, expected_cache)
        )
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("sequences", ["decode", "prefill"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_every_shape(implementation, shape, sequences):
    _check_attention(implementation, attention_cases.make_case(shape, sequences))


@pytest.mark.parametrize("sequences", ["decode", "prefill"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_of_every_shape(implementation, shape, sequences):
    _check_step(implementation, attention_cases.make_case(shape, sequences))


@pytest.mark.parametrize(
    ("sequences", "window"),
    [
        *[("decode", 1), ("decode", 33), ("long decode", None), ("long decode", 500), ("longest decode", None)],
        *[("chunks behind a prefix", 1), ("chunks behind a prefix", 33), ("chunks behind a prefix", None)],
    ],
)
def test_a_step_of_every_window_and_number_of_splits(implementation, sequences, window):
    _check_step(implementation, attention_cases.make_case("odd head_dim", sequences, window=window))


@pytest.mark.parametrize("options", OPTIONS[1:])
@pytest.mark.parametrize("sequences", ["decode", "long decode", "chunks behind a prefix"])
def test_a_step_with_every_option(implementation, sequences, options):
    _check_step(implementation, attention_cases.make_case("odd head_dim", sequences, options=options))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 2, 6])
@pytest.mark.parametrize("sequences", ["decode", "prefill"])
def test_heads_of_which_a_part_is_turned(implementation, sequences, rotary_dim, is_interleaved):
    case = attention_cases.make_case("odd head_dim", sequences)
    _check_step(implementation, case, rotary_dim, is_interleaved)


@pytest.mark.parametrize("sequences", ["long decode", "prefill"])
@pytest.mark.parametrize("dtype", attention_cases.TOLERANCE)
def test_a_step_of_every_dtype(implementation, dtype, sequences):
    _check_step(implementation, attention_cases.make_case("llama", sequences, dtype))


@pytest.mark.parametrize("sequences", ["decode", "longest decode", "chunks behind a prefix"])
def test_a_sequence_gets_the_same_bits_whoever_shares_the_batch(implementation, sequences):
    case = attention_cases.make_case("odd head_dim", sequences)
    step = attention_cases.make_rotary_step(case)
    tensors = [tensor.to(implementation.device) for tensor in step.copied()]
    tables, starts, contexts, num_decodes, *rest = attention_cases.sequence_fields(case.to(implementation.device))
    together = implementation.rotary_attention(*tensors, tables, starts, contexts, num_decodes, *rest, False)
    for row, context in enumerate(contexts.tolist()):
        rows = slice(*starts[row : row + 2].tolist())
        own_table = tables[row : row + 1, : -(-context // case.sequences.block_size)].contiguous()
        one = (own_table, starts[row : row + 2] - starts[row], contexts[row : row + 1], int(row < num_decodes))
        qkv, cos, sin, keys, values, slots = tensors
        own = (qkv[rows], cos[rows], sin[rows], keys, values, slots[rows])
        assert torch.equal(together[rows], implementation.rotary_attention(*own, *one, *rest, False))


def test_rows_behind_the_last_sequence_are_left_alone(implementation):
    """As of a captured step that is larger than its batch."""
    case = attention_cases.make_case("one head", "prefill")
    step = attention_cases.make_rotary_step(case)
    qkv, cos, sin, keys, values, slots = (tensor.to(implementation.device) for tensor in step.copied())
    s = attention_cases.sequence_fields(case.to(implementation.device))
    expected = implementation.rotary_attention(qkv, cos, sin, keys.clone(), values.clone(), slots, *s, False)
    tables, starts, contexts, *rest = s
    padded = [torch.cat((x, x[:2])) for x in (qkv, cos, sin)]
    scratch = torch.full((2,), len(keys), device=slots.device)
    caches = [torch.cat((x, x[:1])) for x in (keys, values)]
    more = torch.cat((tables, tables[:1])), torch.cat((starts, starts[-1:])), torch.cat((contexts, contexts[:1]))
    actual = implementation.rotary_attention(*padded, *caches, torch.cat((slots, scratch)), *more, *rest, False)
    assert torch.equal(actual[: len(qkv)], expected)


@pytest.mark.parametrize("sequences", ["long decode", "longest decode"])
@pytest.mark.parametrize("window", [None, 500])
def test_a_program_that_takes_several_splits_gives_the_bits_of_programs_of_one(
    implementation, monkeypatch, window, sequences
):
    """As in steps of many sequences."""
    case = implementation.caches_of(
        attention_cases.make_case("odd head_dim", sequences, window=window, options="sinks")
    )
    results, num_heads = [], len(case.sequences.context_lens) * 2
    for programs in (1, 2 * num_heads, 5 * num_heads, 16 * num_heads):
        monkeypatch.setattr(decode_attention, "_PROGRAMS", programs)
        step = [
            attention_cases.moved(x, implementation.device) for x in attention_cases.make_rotary_step(case).copied()
        ]
        results.append(implementation.rotary_attention(*step, *attention_cases.sequence_fields(case), False))
    assert results[0].isfinite().all()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("shape", ["odd blocks", "odd heads in large blocks"])
def test_a_prompt_has_the_same_bits_however_it_is_cut(implementation, shape, window):
    """Tiles that all queries of a program see are computed without masks: which these are, depends on the cuts."""
    case = implementation.caches_of(attention_cases.make_case(shape, "chunks behind a prefix", window=window))
    (tables, starts, contexts, _, *rest), (begin, end, context) = attention_cases.sequence_fields(case), (1, 10, 140)
    table = tables[1:2]

    def piece(first: int, last: int) -> torch.Tensor:
        lengths = torch.tensor([0, last - first], device=tables.device), contexts[1:2] - (end - last)
        return implementation.paged_attention(case.q[first:last], case.keys, case.values, table, *lengths, 0, *rest)

    assert (int(starts[1]), int(starts[2]), int(contexts[1])) == (begin, end, context)
    whole = piece(begin, end)
    assert torch.equal(torch.cat((piece(begin, 4), piece(4, end))), whole)


def test_the_blocks_of_a_long_prompt_fit_the_grid_of_a_launch(monkeypatch):
    grids = []

    class Launches:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(prompt_attention, "prompt_kernel", Launches())
    num_tokens, num_heads = 70_000, 16
    q, cache = torch.empty(num_tokens, num_heads, 8), torch.empty(16, 1, 8)
    table, starts = torch.zeros(1, num_tokens // 16 + 1, dtype=torch.int64), torch.tensor([0, num_tokens])
    options = (0, 16, 0, 1.0, 0.0, None, None)
    prompt_attention.attend(q, cache, cache, q.flatten(1), 0, table, starts, starts[1:], *options)
    (grid,) = grids
    most = (2**31 - 1, 65_535, 65_535)
    # A float32 tile has sixteen rows, which one token of so many heads fills.
    assert math.prod(grid) == num_tokens + 1
    assert all(size <= limit for size, limit in zip(grid, most, strict=False))


@pytest.mark.parametrize("sequences", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("shape", "kv_dtype"),
    [
        *((name, torch.int8) for name, (*_, head_dim, _) in SHAPES.items() if head_dim % SCALE_BYTES == 0),
        *((name, torch.float8_e4m3fn) for name in ("odd blocks", "odd heads in large blocks")),
    ],
)
def test_a_step_over_8_bit_rows_of_every_shape(implementation, shape, kv_dtype, sequences):
    _check_step(implementation, attention_cases.make_case(shape, sequences, kv_dtype=kv_dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sequences", "window"), [("decode", 33), ("long decode", None), ("prefill", 33)])
def test_attention_over_8_bit_rows_by_queries_of_16_bits(implementation, sequences, window, dtype):
    case = attention_cases.make_case("one head", sequences, dtype, torch.int8, window=window, options="all")
    _check_attention(implementation, case)


@pytest.mark.parametrize("factor", [2.0**-10, 2.0**13])
def test_small_and_large_values_of_8_bit_rows_are_as_exact_as_others(implementation, factor):
    """Weights of float16 take in the scales of values: neither may such products lose bits, nor overflow."""
    case = implementation.caches_of(
        attention_cases.make_case("one head", "chunks behind a prefix", torch.float16, torch.int8)
    )
    expected = reference.paged_attention(*attention_cases.fields(case.to("cpu"), torch.float64)) * factor
    values = KVCodes(case.values.codes, case.values.scales * factor)
    actual = implementation.paged_attention(*attention_cases.fields(replace(case, values=values)))
    tolerance = attention_cases.TOLERANCE[torch.float16]
    torch.testing.assert_close(actual.cpu().double(), expected, atol=tolerance * factor, rtol=tolerance)


@pytest.mark.parametrize("code_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [4, 12, 64, 80])
def test_8_bit_rows_are_stored_as_the_reference_stores_them(implementation, head_dim, dtype, code_dtype):
    x = torch.randn(11, 4, head_dim, generator=torch.Generator().manual_seed(4))
    x[1, 0], x[2, 1, 3], x[3, 2, 1], x[4, 3] = 0, torch.nan, -torch.inf, 1e-35
    x[5, :, 2] *= 1e30
    heads = x.to(dtype).to(implementation.device)
    slots = torch.tensor([3, 0, 9, 12, 1, 2, 5, 11, 4, 7, 8], device=implementation.device)
    rows = torch.full((13, 2, head_dim + SCALE_BYTES), 55, dtype=torch.uint8).view(code_dtype)
    caches = [attention_cases.moved(KVCodes.of_rows(rows), implementation.device) for _ in range(2)]
    # Heads of keys and values alone, without queries.
    none = heads.new_empty(11, 1, 0)
    cuda.rotation.rotate_and_store(heads.flatten(1), none, none, *caches, slots, False)
    for cache, stored in zip(caches, (heads[:, :2], heads[:, 2:]), strict=True):
        found = cache.rows().view(torch.uint8)
        assert torch.equal(found[slots], quantize_rows(stored, code_dtype).view(torch.uint8))
        assert (found[[6, 10]] == 55).all()


def _rows(case: Case, tokens: torch.Tensor | None = None) -> Case:
    """A step without prompts, or some of its rows."""
    tokens = torch.arange(len(case.mapping)) if tokens is None else tokens
    mapping = case.mapping[tokens]
    return Case(case.shape, case.tables, mapping, rows_of(mapping), case.x[tokens], case.y[tokens])


_ROW_RANKS = (1, 3, 8, 0, 17, 64, 128, 16)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("shape", "lora_dtype", "dtype"),
    [
        *[(ODD, lora_dtype, torch.float32) for lora_dtype in (torch.float32, torch.bfloat16, *CODES)],
        *[(FUSED, lora_dtype, torch.bfloat16) for lora_dtype in (torch.bfloat16, *CODES)],
        *[(_LONG, lora_dtype, torch.float32) for lora_dtype in (torch.float32, torch.bfloat16, torch.uint8)],
    ],
)
def test_rows_by_themselves_are_those_of_the_reference(implementation, shape, lora_dtype, dtype):
    case = _rows(make_case("zipf", 12, shape, _ROW_RANKS, lora_dtype, dtype, magnitudes=True))
    v, y = _run(implementation, case)
    rtol, atol = TOLERANCES[torch.float32]
    defined = case.touched()[:, :, None] & (
        torch.arange(case.tables.max_rank) < case.tables.rank[case.mapping.clamp(min=0)].T[:, :, None]
    )
    expected_v = case.expected_v()
    torch.testing.assert_close(v.sum(0).cpu()[defined].double(), expected_v[0][defined], rtol=rtol, atol=atol)
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(y.double(), case.expected_y(expected_v), rtol=rtol, atol=atol)


def _gate_up(inner: int, in_features: int = 77) -> LinearShape:
    """Gate and up after another slice, of which they know nothing."""
    return LinearShape(in_features, (5, inner, inner))


def _activate(implementation, case: Case, activation: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """v, the activations, and those of `lora_expand` and the operator after it."""
    on_device, (_, inner, _) = implementation.place(case), case.shape.slice_sizes
    v = implementation.lora_shrink(on_device.x, on_device.tables, 1, 2, on_device.segments)
    together, apart = (on_device.y[:, 5:].contiguous() for _ in range(2))
    arguments = (1, inner, on_device.segments, activation)
    actual = implementation.lora_expand_activated(v, together, on_device.tables, *arguments)
    implementation.lora_expand(v, apart, on_device.tables, 1, (inner, inner), on_device.segments)
    return v, actual, getattr(implementation, f"{activation}_mul")(apart)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("shape", "lora_dtype", "dtype"),
    [
        (_gate_up(33), torch.float32, torch.float32),
        (_gate_up(33), torch.bfloat16, torch.float32),
        *[(_gate_up(33), lora_dtype, torch.float32) for lora_dtype in CODES],
        (_gate_up(530), torch.bfloat16, torch.bfloat16),
        (_gate_up(530), torch.uint8, torch.bfloat16),
        (_gate_up(1), torch.float16, torch.float16),
        (_gate_up(40, 2500), torch.bfloat16, torch.bfloat16),
    ],
)
def test_rows_with_their_activation_are_those_of_two_operators(implementation, shape, lora_dtype, dtype, activation):
    case = _rows(make_case("distinct", 14, shape, (*_ROW_RANKS, 0, 0), lora_dtype, dtype, magnitudes=True))
    has = case.touched()[1:]
    assert {tuple(each) for each in has.T.tolist()} == set(itertools.product((False, True), repeat=2))
    v, actual, apart = _activate(implementation, case, activation)
    assert torch.equal(actual, apart)
    expected, on_cpu = case.y[:, 5:].double(), v.sum(0, keepdim=True).cpu().double()
    arguments = (1, shape.slice_sizes[1], case.segments, activation)
    expected = reference.lora_expand_activated(on_cpu, expected, case.tables, *arguments)
    rtol, atol = (2 * tolerance for tolerance in TOLERANCES[dtype])
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=rtol, atol=atol)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("num_tokens", "shape", "max_rank", "lora_dtype", "dtype", "chunk_size", "activation", "base_share"),
    [
        (29, _gate_up(75), 70, torch.bfloat16, torch.bfloat16, 16, "silu", 0.3),
        (12, _gate_up(75, 2500), 16, torch.bfloat16, torch.bfloat16, 64, "gelu_tanh", 0.8),
        (12, _gate_up(33), 70, torch.bfloat16, torch.bfloat16, 64, "gelu_tanh", 0.8),
        (40, _gate_up(33), 16, torch.int8, torch.float32, 16, "silu", 1.0),
        (37, _gate_up(35), 17, torch.float8_e4m3fn, torch.bfloat16, 16, "gelu_tanh", 0.0),
        (133, _gate_up(141), 16, torch.uint8, torch.float16, 64, "silu", 0.6),
        (150, _gate_up(40), 16, torch.float32, torch.float32, 16, "silu", 0.05),
    ],
)
@pytest.mark.parametrize("programs", [512, 1])
def test_chunks_with_their_activation_are_those_of_two_operators(
    implementation,
    monkeypatch,
    num_tokens,
    shape,
    max_rank,
    lora_dtype,
    dtype,
    chunk_size,
    activation,
    base_share,
    programs,
):
    """Among them steps of the base model alone and of more adapters than the kernel counts at a time. programs: with 1
    of them, a program takes several blocks of outputs. Of 70 ranks in chunks of 64 the v of both are too much.
    """
    monkeypatch.setattr(expand, "_PROGRAMS", programs)
    ranks = (8, 3, 0, max_rank)
    popularity = "distinct" if num_tokens in (12, 150) else "zipf"
    case = make_case(popularity, num_tokens, shape, ranks, lora_dtype, dtype, base_share, magnitudes=True)
    # The tokens of the base model come after those of adapters, as a GPU sorts them.
    capacity = capacity_of(num_tokens, len(case.tables.rank), chunk_size)
    case = replace(case, segments=reference_segments(case.mapping, len(case.tables.rank), chunk_size, capacity))
    v, actual, apart = _activate(implementation, case, activation)
    assert torch.equal(actual, apart)
    expected, on_cpu = case.y[:, 5:].double(), v.sum(0, keepdim=True).cpu().double()
    arguments = (1, shape.slice_sizes[1], case.to("cpu").segments, activation)
    expected = reference.lora_expand_activated(on_cpu, expected, case.tables, *arguments)
    rtol, atol = (2 * tolerance for tolerance in TOLERANCES[dtype])
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("lora_dtype", [torch.bfloat16, *CODES])
def test_a_row_with_its_activation_has_the_same_bits_alone_and_among_others(implementation, lora_dtype):
    case = make_case("distinct", 12, _gate_up(40), (1, 8, 0, 17, 16), lora_dtype, magnitudes=True, base_share=0.3)
    _, together, _ = _activate(implementation, _rows(case), "silu")
    for tokens in (torch.tensor([0]), torch.tensor([11]), torch.arange(1, 12, 5).flip(0)):
        assert torch.equal(_activate(implementation, _rows(case, tokens), "silu")[1], together[tokens])


@pytest.mark.parametrize("lora_dtype", CODES)
def test_adapters_come_to_the_order_of_a_gpu_in_place_and_nothing_else_changes(implementation, lora_dtype):
    case = make_case("distinct", 9, ODD, (1, 3, 8, 0, 17, 64, 16, 33), lora_dtype, magnitudes=True, base_share=0)
    sizes = torch.tensor(ODD.slice_sizes)
    tables, has = case.tables, case.tables.rank > 0
    arena = tables.arena.clone().to(implementation.device)
    where = (tables.rank[has], tables.b_offset[has], sizes.expand(tables.rank.shape)[has])
    cuda.order_codes(arena, *(x.long().to(implementation.device) for x in where), tables.max_rank)
    expected = reference_order(tables, sizes).arena
    assert torch.equal(arena.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert not torch.equal(expected.view(torch.uint8), tables.arena.view(torch.uint8))


@pytest.mark.parametrize("lora_dtype", [torch.bfloat16, *CODES])
def test_a_row_has_the_same_bits_alone_and_among_128_beside_any_adapters(implementation, lora_dtype):
    case = make_case("zipf", 128, LinearShape(300, (40,)), (*_ROW_RANKS, 16), lora_dtype, magnitudes=True, seed=5)
    _, together = _run(implementation, _rows(case))
    for tokens in (torch.tensor([0]), torch.tensor([127]), torch.arange(3, 128, 17).flip(0)):
        assert torch.equal(_run(implementation, _rows(case, tokens))[1], together[tokens])


@pytest.mark.parametrize(("num_tokens", "max_loras"), [(1, 1), (7, 3), (100, 5), (300, 40), (515, 4)])
@pytest.mark.parametrize("chunk_size", [2, 16, 64])
def test_segments_in_one_launch_are_those_of_torch(implementation, num_tokens, max_loras, chunk_size):
    generator = torch.Generator().manual_seed(num_tokens)
    mapping = torch.randint(-1, max_loras, (num_tokens,), generator=generator).to(implementation.device)
    capacity = min(num_tokens, max_loras + num_tokens // chunk_size)
    permutation, *chunks = segments.lora_segments(mapping, max_loras, chunk_size, capacity)
    expected = reference_segments(mapping, max_loras, chunk_size, capacity)
    num_used = int((mapping >= 0).sum())
    assert torch.equal(permutation[:num_used], expected.permutation[:num_used])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(chunks, expected[1:4], strict=True))


@pytest.mark.parametrize("what", ["decodes", "decodes without adapters", "prompts"])
@pytest.mark.parametrize(("num_rows", "num_logits", "num_blocks"), [(5, 3, 2), (1, 1, 130), (7, 0, 1), (0, 0, 3)])
def test_inputs_of_a_graph_are_filled_in_one_launch_as_one_by_one(
    implementation, what, num_rows, num_logits, num_blocks
):
    def inputs(rows, logits, width, fill):
        memory = torch.full((6, rows), fill, dtype=torch.int64) if fill else torch.randint(0, 99, (6, rows))
        vectors = [*memory[:5], memory[5, :logits]]
        if what == "prompts":
            return StepInputs(*vectors[:3])
        if what == "decodes without adapters" and not fill:
            vectors[2] = None
        return StepInputs(*vectors, block_tables=torch.arange(rows * width).view(rows, width) - 1)

    def to_device(of):
        values = {name: None if x is None else x.clone().to(implementation.device) for name, x in vars(of).items()}
        return StepInputs(**values)

    step, expected = inputs(num_rows, num_logits, num_blocks, 0), inputs(9, 9, 135, 55)
    actual = to_device(expected)
    cuda.fill_step_inputs(actual, to_device(step), 7, 99, 16)
    step_inputs_reference.fill_step_inputs(expected, step, 7, 99, 16)
    for name, values in vars(expected).items():
        assert values is None or torch.equal(getattr(actual, name).cpu(), values), name
