"""The rotation of queries and keys and the writing of the KV cache, in one launch; see `attention.rotary_attention`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.cuda.integers import next_power_of_2
from multilora_kernels.cuda.kv_rows import store_row
from multilora_kernels.kv_rows import kv_head_dim


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    is_interleaved: bool,
) -> torch.Tensor:
    """Store keys and values of all tokens. Returns the turned queries, [num_tokens, num_heads, head_dim]."""
    num_tokens, num_kv_heads, head_dim = len(qkv), keys.shape[1], kv_head_dim(keys)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    rotate_and_store_kernel[num_tokens, num_heads + 2 * num_kv_heads](
        qkv,
        cos,
        sin,
        q,
        keys,
        values,
        slots,
        num_heads,
        num_kv_heads,
        qkv.stride(0),
        cos.stride(0),
        keys.stride(0),
        keys.stride(1),
        **rotation_constants(head_dim, cos.shape[2], is_interleaved),
    )
    return q


def rotation_constants(head_dim: int, rotary_dim: int, is_interleaved: bool) -> dict[str, Any]:
    """The constants of the kernel."""
    return {
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "IS_INTERLEAVED": is_interleaved,
        "BLOCK_D": next_power_of_2(head_dim),
        "num_warps": 1,
    }


@triton.jit
def rotate_and_store_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    slot_ptr,
    num_heads,
    num_kv_heads,
    stride_xm,
    stride_cm,
    stride_ks,
    stride_kh,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: one head of one token, of the queries', the keys' or the values'."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    x_row = qkv_ptr + token * stride_xm + head * HEAD_DIM
    angles = token * stride_cm
    slot = tl.load(slot_ptr + token) * stride_ks
    if head < num_heads:
        x = load_turned(x_row, dims, cos_ptr + angles, sin_ptr + angles, True, HEAD_DIM, ROTARY_DIM, IS_INTERLEAVED)
        tl.store(q_ptr + (token * num_heads + head) * HEAD_DIM + dims, x, mask=dims < HEAD_DIM)
    elif head < num_heads + num_kv_heads:
        x = load_turned(x_row, dims, cos_ptr + angles, sin_ptr + angles, True, HEAD_DIM, ROTARY_DIM, IS_INTERLEAVED)
        store_row(keys_ptr + slot + (head - num_heads) * stride_kh, x, dims, HEAD_DIM)
    else:
        x = tl.load(x_row + dims, mask=dims < HEAD_DIM, other=0.0)
        store_row(values_ptr + slot + (head - num_heads - num_kv_heads) * stride_kh, x, dims, HEAD_DIM)


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
