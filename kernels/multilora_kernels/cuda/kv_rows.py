"""`store_codes`: keys or values of tokens into a KV cache in codes of 8 bits, in OpenAI Triton; see `kv_rows`.

Compiled ahead of time and run in Triton's interpreter; not timed on a device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels import kv_rows

_LARGEST_CODE = tl.constexpr(kv_rows.LARGEST_CODES[torch.int8])
_SMALLEST_SCALED = tl.constexpr(kv_rows.SMALLEST_SCALED)

_ROUNDED_FROM = tl.constexpr(1.5 * 2**23)
"""Added to a number of at most 2^22 it leaves the nearest integer in the lowest bits; halves go to even ones."""


def store_codes(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store `quantize_rows(x)` in the rows of a cache, bit for bit.

    x: [num_tokens, num_kv_heads, head_dim], floating. cache: int8 [num_slots, num_kv_heads, head_dim + SCALE_BYTES];
    head_dim is a multiple of four, since a scale is written at once. slots: [num_tokens] int64.
    """
    num_tokens, num_kv_heads, head_dim = x.shape
    assert head_dim % kv_rows.SCALE_BYTES == 0
    assert x.stride(2) == cache.stride(2) == 1
    store_codes_kernel[num_tokens, num_kv_heads](
        x, cache, slots, x.stride(0), x.stride(1), cache.stride(0), cache.stride(1), **store_constants(head_dim)
    )


def store_constants(head_dim: int) -> dict[str, Any]:
    """The constants of the kernel."""
    return {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "num_warps": 1}


@triton.jit
def store_codes_kernel(
    x_ptr,
    cache_ptr,
    slot_ptr,
    stride_xm,
    stride_xh,
    stride_ks,
    stride_kh,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: one head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    mask = dims < HEAD_DIM
    x = tl.load(x_ptr + token * stride_xm + head * stride_xh + dims, mask=mask, other=0.0).to(tl.float32)
    # As integers, in the order of the numbers: NaN is the largest, which a maximum of numbers may pass over.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
    is_number = largest < float("inf")
    is_scaled = is_number & (largest >= _SMALLEST_SCALED)
    divisor = tl.where(is_scaled, largest, 1.0)
    largest_code = tl.full((), _LARGEST_CODE, tl.float32)
    per_unit = tl.div_rn(largest_code, divisor)
    rounded = tl.where(is_scaled, x * per_unit, 0.0) + _ROUNDED_FROM
    codes = (rounded - _ROUNDED_FROM).to(tl.int8)
    scale = tl.div_rn(divisor, largest_code)
    scale = tl.where(is_scaled, scale, tl.where(is_number, 0.0, float("nan")))
    row = cache_ptr + tl.load(slot_ptr + token) * stride_ks + head * stride_kh
    tl.store(row + dims, codes, mask=mask)
    tl.store((row + HEAD_DIM).to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def load_row_scales(rows, mask, HEAD_DIM: tl.constexpr):
    """The scales of rows, which are pointers to their first codes; zero where the mask is not set."""
    return tl.load((rows + HEAD_DIM).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
