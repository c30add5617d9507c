"""Rows of a KV cache in OpenAI Triton, plain or in codes of 8 bits; see `multilora_kernels.kv_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from multilora_kernels import kv_rows

_LARGEST_CODE = tl.constexpr(kv_rows.LARGEST_CODES[torch.int8])
_SMALLEST_SCALED = tl.constexpr(kv_rows.SMALLEST_SCALED)

_ROUNDED_FROM = tl.constexpr(1.5 * 2**23)
"""Added to a number of at most 2^22 it leaves the nearest integer in the lowest bits; halves go to even ones."""


@triton.jit
def store_row(row, x, dims, HEAD_DIM: tl.constexpr):
    """Store one head of one token in a cache, as it is or in codes. row: pointer to its first element."""
    mask = dims < HEAD_DIM
    if row.dtype.element_ty == tl.int8:
        x = x.to(tl.float32)
        # As integers, in the order of the numbers: NaN is the largest, which a maximum of numbers may pass over.
        bits = tl.where(mask, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        largest = tl.max(bits, 0).to(tl.float32, bitcast=True)
        is_number = largest < float("inf")
        is_scaled = is_number & (largest >= _SMALLEST_SCALED)
        divisor = tl.where(is_scaled, largest, 1.0)
        largest_code = tl.full((), _LARGEST_CODE, tl.float32)
        per_unit = tl.div_rn(largest_code, divisor)
        # The bound keeps compilers from fusing the product with the sum, which would round once where the definition
        # rounds twice.
        rounded = tl.where(is_scaled, tl.minimum(x * per_unit, largest_code), 0.0) + _ROUNDED_FROM
        codes = (rounded - _ROUNDED_FROM).to(tl.int8)
        scale = tl.div_rn(divisor, largest_code)
        scale = tl.where(is_scaled, scale, tl.where(is_number, 0.0, float("nan")))
        tl.store(row + dims, codes, mask=mask)
        tl.store((row + HEAD_DIM).to(tl.pointer_type(tl.float32)), scale)
    else:
        tl.store(row + dims, x.to(row.dtype.element_ty), mask=mask)


@triton.jit
def load_row_scales(rows, mask, HEAD_DIM: tl.constexpr):
    """The scales of rows, which are pointers to their first codes; zero where the mask is not set."""
    return tl.load((rows + HEAD_DIM).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
