"""What only the GPU operators promise; collected on a GPU and in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from support import attention_cases
from support.attention_cases import OPTIONS, SHAPES
from support.lora_cases import TOLERANCES, Case, make_case

from benchmarks.synthetic_batches import LinearShape
from multilora_kernels import lora_segments, reference
from multilora_kernels.kv_rows import SCALE_BYTES, quantize_rows

_LONG = LinearShape(in_features=2500, slice_sizes=(40, 24))


def _run(implementation, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    on_device = case.to(implementation.device)
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


def test_prefill_chunks_give_the_same_result_from_one_part(implementation):
    case = make_case("skewed", 70, _LONG, ranks=(8, 0, 20))
    segments = lora_segments(case.mapping, case.tables.rank.shape[0], chunk_size=64)
    v, y = _run(implementation, Case(case.shape, case.tables, case.mapping, segments, case.x, case.y))
    assert v.shape[0] == 1
    rtol, atol = TOLERANCES[torch.float32]
    torch.testing.assert_close(y.double(), case.expected_y(case.expected_v()), rtol=rtol, atol=atol)


def _check_attention(implementation, case: attention_cases.Case) -> None:
    actual = implementation.paged_attention(*attention_cases.fields(case.to(implementation.device)))
    expected = reference.paged_attention(*attention_cases.fields(case, torch.float64))
    assert actual.dtype == case.q.dtype
    tolerance = attention_cases.TOLERANCE[case.q.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_attention_of_every_shape(implementation, shape):
    _check_attention(implementation, attention_cases.make_case(shape, "decode"))


@pytest.mark.parametrize(
    ("sequences", "window"),
    [("decode", 1), ("decode", 33), ("long decode", None), ("long decode", 500), ("longest decode", None)],
)
def test_decode_attention_of_every_window_and_number_of_splits(implementation, sequences, window):
    _check_attention(implementation, attention_cases.make_case("odd head_dim", sequences, window=window))


@pytest.mark.parametrize("options", OPTIONS[1:])
@pytest.mark.parametrize("sequences", ["decode", "long decode"])
def test_decode_attention_with_every_option(implementation, sequences, options):
    _check_attention(implementation, attention_cases.make_case("odd head_dim", sequences, options=options))


@pytest.mark.parametrize("dtype", attention_cases.TOLERANCE)
def test_decode_attention_of_every_dtype(implementation, dtype):
    _check_attention(implementation, attention_cases.make_case("llama", "long decode", dtype))


@pytest.mark.parametrize("sequences", ["decode", "longest decode"])
def test_a_decoding_sequence_gets_the_same_bits_whoever_shares_the_batch(implementation, sequences):
    case = attention_cases.make_case("odd head_dim", sequences).to(implementation.device)
    q, keys, values, tables, starts, contexts, num_decodes, *rest = attention_cases.fields(case)
    together = implementation.paged_attention(q, keys, values, tables, starts, contexts, num_decodes, *rest)
    for row, context in enumerate(contexts.tolist()):
        own_table = tables[row : row + 1, : -(-context // case.sequences.block_size)].contiguous()
        one = (own_table, starts[:2], contexts[row : row + 1], 1)
        alone = implementation.paged_attention(q[row : row + 1], keys, values, *one, *rest)
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("shape", [name for name, (*_, head_dim, _) in SHAPES.items() if head_dim % SCALE_BYTES == 0])
def test_decode_attention_over_int8_rows_of_every_shape(implementation, shape):
    _check_attention(implementation, attention_cases.make_case(shape, "decode", kv_dtype=torch.int8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sequences", "window"), [("decode", 33), ("long decode", None)])
def test_decode_attention_over_int8_rows_by_queries_of_16_bits(implementation, sequences, window, dtype):
    case = attention_cases.make_case("one head", sequences, dtype, torch.int8, window=window, options="all")
    _check_attention(implementation, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [4, 12, 64, 80])
def test_int8_rows_are_stored_as_the_reference_stores_them(implementation, head_dim, dtype):
    x = torch.randn(11, 5, head_dim, generator=torch.Generator().manual_seed(4))
    x[1, 0], x[2, 1, 3], x[3, 2, 1], x[4, 3] = 0, torch.nan, -torch.inf, 1e-35
    x[5, :, 2] *= 1e30
    heads = x.to(dtype)[:, 1:4].to(implementation.device)
    slots = torch.tensor([3, 0, 9, 12, 1, 2, 5, 11, 4, 7, 8], device=implementation.device)
    cache = torch.full((13, 3, head_dim + SCALE_BYTES), 55, dtype=torch.int8, device=implementation.device)
    implementation.store_heads(heads, cache, slots)
    assert torch.equal(cache[slots], quantize_rows(heads))
    assert (cache[[6, 10]] == 55).all()
