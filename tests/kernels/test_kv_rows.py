"""Keys and values in codes of 8 bits: their largest error, and that all ways of storing agree."""

from __future__ import annotations

import math

import pytest
import torch
from support.attention_cases import SEQUENCES, SHAPES, make_case, make_rotary_step
from torch.utils._python_dispatch import TorchDispatchMode

from multilora_kernels import (
    KVCodes,
    copy_blocks,
    kv_head_dim,
    kv_row_size,
    load_rows,
    rotary_attention,
    store_rows,
)
from multilora_kernels.kv_rows import (
    LARGEST_CODES,
    SCALE_BYTES,
    copy_slots,
    dequantize_rows,
    num_kv_heads,
    quantize_rows,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FP8 = torch.float8_e4m3fn
CODES = [torch.int8, FP8]


def assert_same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def load_codes(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)[slots].view(cache.dtype)


def heads_of_every_size() -> torch.Tensor:
    """[18, 3, 12]: normal numbers, outliers, single numbers; from the largest to the smallest that have codes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(18, 3, 12, generator=generator)
    x[:, 1, 5] *= 1000
    x[:, 2, 1:] = 0
    return x * torch.logspace(-29, 34, 18)[:, None, None]


def unusual_heads() -> torch.Tensor:
    """[6, 1, 8]: nothing, next to nothing, an infinity of either sign, NaN, NaN beside infinity."""
    x = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(1))
    x[0] = 0
    x[1] *= 1e-35
    x[2, 0, 3], x[3, 0, 7], x[4, 0, 0] = math.inf, -math.inf, math.nan
    x[5, 0, :2] = torch.tensor([math.nan, math.inf])
    return x


def test_no_element_is_off_by_more_than_the_254th_part_of_the_largest_of_its_head():
    x = heads_of_every_size()
    error = (dequantize_rows(quantize_rows(x)).double() - x.double()).abs()
    largest = x.double().abs().amax(-1, keepdim=True)
    assert (error <= largest / (2 * LARGEST_CODES[torch.int8]) * (1 + 1e-6)).all()
    assert torch.equal(dequantize_rows(quantize_rows(x))[:, 2, 1:], torch.zeros(18, 11))


def test_no_element_in_fp8_is_off_by_more_than_its_16th_part():
    x = heads_of_every_size()
    error = (dequantize_rows(quantize_rows(x, FP8)).double() - x.double()).abs()
    scale = x.double().abs().amax(-1, keepdim=True) / LARGEST_CODES[FP8]
    assert (error <= torch.maximum(x.double().abs() / 16, scale * 2.0**-10) * (1 + 1e-6)).all()
    assert ((dequantize_rows(quantize_rows(x, FP8)) - x).abs() > x.abs() / 40).any()


class _DividesAsAGpu(TorchDispatchMode):
    """A tensor divided by a number is multiplied by the number's inverse, as PyTorch's CUDA kernels do it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.div.Tensor and (not isinstance(args[1], torch.Tensor) or args[1].dim() == 0):
            return args[0] * (torch.tensor(1.0) / args[1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", CODES)
def test_a_gpu_has_the_codes_and_scales_of_a_cpu(dtype):
    x = heads_of_every_size()
    with _DividesAsAGpu():
        as_on_a_gpu = quantize_rows(x, dtype)
        assert not torch.equal(x / LARGEST_CODES[torch.int8], x / torch.full_like(x, LARGEST_CODES[torch.int8]))
    assert_same_bytes(as_on_a_gpu, quantize_rows(x, dtype))


@pytest.mark.parametrize(("head_dim", "most"), [(64, 0.007), (128, 0.0075)])
def test_heads_of_normal_numbers_are_off_by_less_than_a_hundredth(head_dim, most):
    x = torch.randn(500, 3, head_dim, generator=torch.Generator().manual_seed(2))
    error = dequantize_rows(quantize_rows(x)) - x
    assert 0.003 < (error.norm() / x.norm()).item() < most


@pytest.mark.parametrize("dtype", CODES)
def test_a_head_without_a_number_to_scale_by_is_zero_or_nan(dtype):
    restored = dequantize_rows(quantize_rows(unusual_heads(), dtype))
    assert torch.equal(restored[:2], torch.zeros(2, 1, 8))
    assert restored[2:].isnan().all()


def test_a_row_depends_on_nothing_but_its_head():
    x = heads_of_every_size()
    together = quantize_rows(x)
    for token, head in ((0, 0), (7, 1), (17, 2)):
        assert torch.equal(quantize_rows(x[token, head]), together[token, head])


def test_the_size_of_a_row_is_that_of_its_codes_and_its_scale():
    assert [kv_row_size(64, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8)] == [64, 64, 68]
    assert [kv_head_dim(torch.empty(1, 68, dtype=dtype)) for dtype in (torch.bfloat16, torch.int8)] == [68, 64]


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 0), (torch.bfloat16, 0.02), (torch.int8, 0.02), (FP8, 0.15)]
)
def test_what_is_stored_is_loaded_and_nothing_else_is_touched(dtype, most):
    x, slots = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(3)), torch.tensor([8, 1, 0, 5, 3])
    cache = torch.full((10, 3, kv_row_size(12, dtype)), 77).to(dtype)
    before = cache.clone()
    store_rows(x, cache, slots)
    torch.testing.assert_close(load_rows(cache, slots, torch.float32), x, atol=most, rtol=0)
    others = torch.tensor([2, 4, 6, 7, 9])
    assert torch.equal(cache.view(torch.uint8)[others], before.view(torch.uint8)[others])


@pytest.mark.parametrize("dtype", CODES)
def test_codes_with_their_scales_apart_are_those_of_rows(dtype):
    x, slots = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(3)), torch.tensor([8, 1, 0, 5, 3])
    rows = torch.full((2, 12, 3, kv_row_size(12, dtype)), 77, dtype=torch.uint8).view(dtype)
    apart = KVCodes.of_rows(rows)
    assert (kv_head_dim(apart), num_kv_heads(apart), apart.nbytes) == (12, 3, rows.nbytes)
    for caches in (rows, apart):
        for layer in range(2):
            store_rows(x * (layer + 1), caches[layer], slots)
        copy_blocks(caches, 3, torch.tensor([0, 1]), torch.tensor([3, 2]))
    assert_same_bytes(apart.rows(), rows)
    loaded = (load_rows(caches[1], slots, torch.float32) for caches in (rows, apart))
    assert torch.equal(*loaded)
    copy_slots(apart[0], apart[1], slots[:2])
    rows.view(torch.uint8)[1, slots[:2]] = rows.view(torch.uint8)[0, slots[:2]]
    assert_same_bytes(apart.rows(), rows)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_step_stores_the_codes_of_what_it_stores_as_floats(shape, sequences, dtype):
    case = make_case(shape, sequences)
    floats, codes = make_rotary_step(case).copied(), make_rotary_step(case).copied()
    codes[3:5] = [quantize_rows(cache, dtype) for cache in codes[3:5]]
    rotary_attention(*floats, case.sequences)
    rotary_attention(*codes, case.sequences)
    for as_floats, as_codes in zip(floats[3:5], codes[3:5], strict=True):
        assert_same_bytes(as_codes, quantize_rows(as_floats, dtype))


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("heads", [heads_of_every_size(), unusual_heads()], ids=["every size", "unusual"])
def test_heads_of_every_size_are_stored_by_a_step_as_by_the_reference(heads, dtype):
    num_tokens, num_heads, head_dim = heads.shape
    qkv = torch.cat((torch.zeros_like(heads), heads, heads.flip(1)), dim=1).flatten(1)
    angles = torch.zeros(num_tokens, 1, 0)
    slots = torch.arange(num_tokens).flip(0)
    keys, values = torch.full((2, num_tokens, num_heads, head_dim + SCALE_BYTES), 99, dtype=torch.uint8).view(dtype)
    sequences = make_case().sequences._replace(
        block_tables=torch.arange(num_tokens)[:, None],
        query_starts=torch.arange(num_tokens + 1),
        context_lens=torch.ones(num_tokens, dtype=torch.int64),
        block_size=1,
    )
    rotary_attention(qkv, angles, angles, keys, values, slots, sequences)
    assert_same_bytes(load_codes(keys, slots), quantize_rows(heads, dtype))
    assert_same_bytes(load_codes(values, slots), quantize_rows(heads.flip(1), dtype))
