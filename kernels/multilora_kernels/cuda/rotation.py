"""The rotation of queries and keys and the writing of the KV cache, in one launch; see `attention.rotary_attention`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.cuda.integers import cdiv, next_power_of_2
from multilora_kernels.cuda.kv_rows import parts_of, store_rows
from multilora_kernels.kv_rows import KVRows, kv_head_dim

_HEADS = 8
"""Of a program: of 128 elements of 16 bits, four warps load each 16 bytes a thread."""


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: KVRows,
    values: KVRows,
    slots: torch.Tensor,
    is_interleaved: bool,
) -> torch.Tensor:
    """Store keys and values of all tokens. Returns the turned queries, [num_tokens, num_heads, head_dim]."""
    (key_rows, key_scales), (value_rows, value_scales) = parts_of(keys), parts_of(values)
    num_tokens, num_kv_heads, head_dim = len(qkv), key_rows.shape[1], kv_head_dim(keys)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    rotate_and_store_kernel[num_tokens, cdiv(num_heads + 2 * num_kv_heads, _HEADS)](
        qkv,
        cos,
        sin,
        q,
        key_rows,
        value_rows,
        key_scales,
        value_scales,
        slots,
        num_heads,
        num_kv_heads,
        qkv.stride(0),
        cos.stride(0),
        key_rows.stride(0),
        key_rows.stride(1),
        0 if key_scales is None else key_scales.stride(0),
        **rotation_constants(head_dim, cos.shape[2], is_interleaved),
    )
    return q


def rotation_constants(head_dim: int, rotary_dim: int, is_interleaved: bool) -> dict[str, Any]:
    """The constants of the kernel."""
    return {
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "IS_INTERLEAVED": is_interleaved,
        "HEADS": _HEADS,
        "BLOCK_D": next_power_of_2(head_dim),
        "num_warps": 4,
    }


@triton.jit
def rotate_and_store_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slot_ptr,
    num_heads,
    num_kv_heads,
    stride_xm,
    stride_cm,
    stride_ks,
    stride_kh,
    stride_sh,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: some heads of one token, of the queries', the keys' and the values'."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    heads = first + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_D)
    x_rows = qkv_ptr + token * stride_xm + heads[:, None] * HEAD_DIM
    angles = token * stride_cm
    first_value = num_heads + num_kv_heads
    if first < first_value:
        is_turned = (heads < first_value)[:, None]
        x = load_turned(
            x_rows, dims[None, :], cos_ptr + angles, sin_ptr + angles, is_turned, HEAD_DIM, ROTARY_DIM, IS_INTERLEAVED
        )
        q_mask = (heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(q_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :], x, mask=q_mask)
        if first + HEADS > num_heads:
            slot = tl.load(slot_ptr + token)
            of_keys = heads - num_heads
            store_rows(
                keys_ptr, key_scales_ptr, slot * stride_ks + of_keys * stride_kh, of_keys * stride_sh + slot, x, dims,
                (heads >= num_heads) & (heads < first_value), HEAD_DIM,
            )  # fmt: skip
    if first + HEADS > first_value:
        slot = tl.load(slot_ptr + token)
        of_values = heads - first_value
        is_value = (of_values >= 0) & (of_values < num_kv_heads)
        x = tl.load(x_rows + dims[None, :], mask=is_value[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        store_rows(
            values_ptr, value_scales_ptr, slot * stride_ks + of_values * stride_kh, of_values * stride_sh + slot, x,
            dims, is_value, HEAD_DIM,
        )  # fmt: skip


@triton.jit
def load_turned(
    x_rows,
    dims,
    cos_row,
    sin_row,
    row_mask,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Heads of one token, turned: computed in float32 and rounded to the type of x.

    x_rows: pointers to the heads' first elements, which broadcast with `dims`, as row_mask does.
    """
    x = tl.load(x_rows + dims, mask=row_mask & (dims < HEAD_DIM), other=0.0)
    if ROTARY_DIM > 0:
        turns = dims < ROTARY_DIM
        partners = dims ^ 1 if IS_INTERLEAVED else (dims + ROTARY_DIM // 2) % ROTARY_DIM
        partner = tl.load(x_rows + partners, mask=row_mask & turns, other=0.0).to(tl.float32)
        cos = tl.load(cos_row + dims, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_row + dims, mask=turns, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * cos + partner * sin).to(x.dtype)
    return x
