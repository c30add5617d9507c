"""Rows of a KV cache in OpenAI Triton, plain or in codes of 8 bits; see `multilora_kernels.kv_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from multilora_kernels import kv_rows
from multilora_kernels.kv_rows import LARGEST_CODES, KVCodes, KVRows

_LARGEST_INT8 = tl.constexpr(LARGEST_CODES[torch.int8])
_LARGEST_FLOAT8 = tl.constexpr(LARGEST_CODES[torch.float8_e4m3fn])
_SMALLEST_SCALED = tl.constexpr(kv_rows.SMALLEST_SCALED)

_ROUNDED_FROM = tl.constexpr(1.5 * 2**23)
"""Added to a number of at most 2^22 it leaves the nearest integer in the lowest bits; halves go to even ones."""

_SMALL_FROM, _SMALL_BITS = tl.constexpr(1.5 * 2**14), tl.constexpr(0x46C00000)
"""Added to a number below 2^-6 it leaves the nearest multiple of 2^-9 in the lowest bits; and its own bits."""


def parts_of(cache: KVRows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and scales as kernels take them: codes of fp8 as bytes, since chips before sm_89 have no float8_e4m3fn."""
    if isinstance(cache, KVCodes):
        assert cache.codes.shape[-1] % 2 == 0, "kernels load two codes at a time"
        return cache.codes.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache.codes, cache.scales
    assert cache.dtype not in LARGEST_CODES, "a GPU's cache has its scales apart"
    return cache, None


@triton.jit
def store_rows(rows_ptr, scales_ptr, places, scale_places, x, dims, is_row, HEAD_DIM: tl.constexpr):
    """Store some heads x [rows, dims] in a cache, as they are or in codes.

    places, scale_places: [rows], of a head's first element and of its scale. scales_ptr: None of a cache of floats.
    """
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    ptrs = rows_ptr + places[:, None] + dims[None, :]
    if scales_ptr is None:
        tl.store(ptrs, x.to(rows_ptr.dtype.element_ty), mask=mask)
    else:
        x = x.to(tl.float32)
        # As integers, in the order of the numbers: NaN is the largest, which a maximum of numbers may pass over.
        bits = tl.where((dims < HEAD_DIM)[None, :], x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
        is_number = largest < float("inf")
        is_scaled = is_number & (largest >= _SMALLEST_SCALED)
        divisor = tl.where(is_scaled, largest, 1.0)
        largest_code = tl.full(
            divisor.shape, _LARGEST_INT8 if rows_ptr.dtype.element_ty == tl.int8 else _LARGEST_FLOAT8, tl.float32
        )
        per_unit = tl.div_rn(largest_code, divisor)
        # The bound keeps compilers from fusing the product with a sum, which would round once where the definition
        # rounds twice.
        values = tl.minimum(x * per_unit[:, None], largest_code[:, None])
        values = tl.where(is_scaled[:, None], values, 0.0)
        if rows_ptr.dtype.element_ty == tl.int8:
            codes = ((values + _ROUNDED_FROM) - _ROUNDED_FROM).to(tl.int8)
        else:
            codes = _float8_codes(values)
        scale = tl.div_rn(divisor, largest_code)
        scale = tl.where(is_scaled, scale, tl.where(is_number, 0.0, float("nan")))
        tl.store(ptrs, codes, mask=mask)
        tl.store(scales_ptr + scale_places, scale, mask=is_row)


@triton.jit
def _float8_codes(x):
    """Bytes of float8_e4m3fn of float32 of at most 448, rounded to the nearest; halves go to even ones."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Three bits of the fraction stay; the biases are 127 and 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (size.to(tl.float32, bitcast=True) + _SMALL_FROM).to(tl.int32, bitcast=True) - _SMALL_BITS
    codes = tl.where(size < 0x3C800000, small, normal)
    return (codes | ((bits >> 24) & 0x80)).to(tl.uint8)
