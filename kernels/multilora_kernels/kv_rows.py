"""Rows of a KV cache: the elements of one head of one token; as they are, or as codes of 8 bits with a scale.

A row of int8 is head_dim codes and, in its last four bytes, a float32 scale:

    scale = max_d |x[d]| / 127,  code[d] = round(x[d] * 127 / max_d |x[d]|),  x[d] ~ code[d] * scale

so no element is off by more than scale / 2, which is 1/254 of the largest one of its head. A row depends on nothing but
its own head and token: it does not depend on the rest of the batch. With no element of 2^-100 or more all are zero;
with one that is infinite or NaN all are NaN, as attention to them would be.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
LARGEST_CODE = 127
SMALLEST_SCALED = 2.0**-100
"""Of the largest element: the inverse of a smaller one may not be a number."""


def kv_row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row in a cache of a type: head_dim, and the scale's bytes behind codes."""
    return head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def kv_head_dim(cache: torch.Tensor) -> int:
    """head_dim of a cache [..., row]."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def quantize_rows(x: torch.Tensor) -> torch.Tensor:
    """Codes and scales of x [..., head_dim], computed in float32: int8 [..., head_dim + SCALE_BYTES]."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    is_scaled = (largest >= SMALLEST_SCALED) & largest.isfinite()
    # One division of tensors: a number divided by a tensor would be rounded twice.
    per_unit = torch.full_like(largest, LARGEST_CODE) / largest
    codes = torch.where(is_scaled, x * per_unit, 0.0).round().to(torch.int8)
    scales = torch.where(is_scaled, largest / LARGEST_CODE, torch.where(largest.isfinite(), 0.0, torch.nan))
    return torch.cat((codes, scales.view(torch.int8)), dim=-1)


def dequantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """The elements of rows that `quantize_rows` made: float32 [..., head_dim]."""
    codes, scales = rows.split_with_sizes((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    return codes.float() * scales.contiguous().view(torch.float32)


def store_rows(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """See `attention.store_heads`; in plain PyTorch."""
    rows = quantize_rows(x) if cache.dtype == torch.int8 else x.to(cache.dtype)
    cache.index_copy_(0, slots, rows)


def load_rows(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Heads of a cache: [len(slots), num_kv_heads, head_dim] of a floating dtype."""
    # index_select copies whole rows; plain indexing is several times slower on a CPU.
    rows = cache.index_select(0, slots)
    return (dequantize_rows(rows) if rows.dtype == torch.int8 else rows).to(dtype)
