"""Rows of a KV cache. A row is the elements of one head of one token, as floats or as 8-bit codes with a scale.

A row of int8 or float8_e4m3fn is head_dim codes and, in its last four bytes, a float32 scale:

    scale = max_d |x[d]| / c,  code[d] = round(x[d] * c / max_d |x[d]|),  x[d] ~ code[d] * scale

with c the largest code, 127 or 448. An element of int8 is off by at most scale / 2, which is 1/254 of the largest
element of its head. An element of float8_e4m3fn is off by at most 1/16 of itself or, below 2^-6 scale, by 2^-10 scale.
A row depends only on its own head and token, not on what else is computed with it. If no element reaches 2^-100, all
become zero. If an element is infinite or NaN, all become NaN, as attention to them would be.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
LARGEST_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code, by the type of codes."""
SMALLEST_SCALED = 2.0**-100
"""The smallest largest element that counts: the inverse of a smaller one may overflow."""


def kv_row_size(head_dim: int, dtype: torch.dtype) -> int:
    """The elements of a row in a cache of this type: head_dim, and for codes the bytes of the scale."""
    return head_dim + (SCALE_BYTES if dtype in LARGEST_CODES else 0)


def kv_head_dim(cache: torch.Tensor) -> int:
    """head_dim of a cache [..., row]."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype in LARGEST_CODES else 0)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Codes and scales of x [..., head_dim], computed in float32. Returns [..., head_dim + SCALE_BYTES] in `dtype`."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    is_scaled = (largest >= SMALLEST_SCALED) & largest.isfinite()
    # Tensors divide tensors here. A number divided by a tensor would be rounded twice. So would a tensor divided by a
    # number on a GPU, where PyTorch multiplies by the number's inverse.
    largest_code = torch.full_like(largest, LARGEST_CODES[dtype])
    per_unit = largest_code / largest
    values = torch.where(is_scaled, x * per_unit, 0.0)
    codes = (values.round() if dtype == torch.int8 else values).to(dtype)
    unscaled = torch.where(largest.isfinite(), 0.0, torch.nan)
    scales = torch.where(is_scaled, largest / largest_code, unscaled)
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1).view(dtype)


def dequantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """The elements of rows that `quantize_rows` made: float32 [..., head_dim]."""
    codes, scales = rows.split_with_sizes((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    return codes.float() * scales.contiguous().view(torch.float32)


def store_rows(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Put keys or values of tokens into a cache, for `attention.paged_attention`.

    x: [num_tokens, num_kv_heads, head_dim], floating. slots: [num_tokens] int64.
    """
    if cache.dtype in LARGEST_CODES:
        _bytes(cache).index_copy_(0, slots, _bytes(quantize_rows(x, cache.dtype)))
    else:
        cache.index_copy_(0, slots, x.to(cache.dtype))


def load_rows(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Heads of a cache: [len(slots), num_kv_heads, head_dim] of a floating dtype."""
    # index_select copies whole rows; plain indexing is several times slower on a CPU.
    if cache.dtype in LARGEST_CODES:
        return dequantize_rows(_bytes(cache).index_select(0, slots).view(cache.dtype)).to(dtype)
    return cache.index_select(0, slots).to(dtype)


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """The same memory, of a type whose rows PyTorch can copy."""
    return codes.view(torch.uint8)
