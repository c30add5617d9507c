"""`paged_attention` of decoding sequences on a GPU, in OpenAI Triton: one query each over the paged cache.

A long context is cut into splits that own programs attend to (flash-decoding, pytorch.org/blog/flash-decoding):
a second kernel adds the splits in order. Where they are cut depends on a sequence's own context alone, so its bits do
not depend on the rest of the batch. torch's `varlen_attn` takes block tables too, but of this cache's small blocks only
with FlashAttention 3, which not every GPU has; FlashAttention 2 wants blocks of 256 tokens.

Compiled ahead of time and run in Triton's interpreter; not timed on a device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.cuda.kv_rows import load_row_scales
from multilora_kernels.cuda.tanh import tanh
from multilora_kernels.cuda.tiles import exact_dot

LOG2_OF_E = tl.constexpr(1.4426950408889634)

MAX_SPLITS = tl.constexpr(16)
"""Sixteen splits of eight key-value heads fill a GPU even when one sequence decodes alone."""

MIN_SPLIT_SIZE = tl.constexpr(256)
"""Keys of the smallest split; fewer do not pay for their share of the second kernel."""


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    num_decodes: int,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """See `multilora_kernels.attention.paged_attention`, with one token a sequence; window 0 and softcap 0 are none."""
    num_sequences, num_heads, head_dim = q.shape
    assert num_sequences == num_decodes == len(block_tables), "the GPU operator is for decode only"
    assert q.stride(2) == keys.stride(2) == block_tables.stride(1) == 1
    assert keys.stride() == values.stride()
    num_kv_heads = keys.shape[1]
    max_keys = block_tables.shape[1] * block_size
    num_splits = min(MAX_SPLITS.value, triton.cdiv(min(window or max_keys, max_keys), MIN_SPLIT_SIZE.value))
    sums = q.new_empty(num_sequences, num_heads, num_splits, head_dim, dtype=torch.float32)
    stats = q.new_empty(num_sequences, num_heads, num_splits, 2, dtype=torch.float32)
    out = q.new_empty(num_sequences, num_heads * head_dim)
    is_wide, has_codes = torch.float32 in (q.dtype, keys.dtype), keys.dtype == torch.int8
    decode_kernel[num_sequences, num_kv_heads, num_splits](
        q,
        keys,
        values,
        block_tables,
        context_lens,
        sums,
        stats,
        scale,
        softcap,
        window,
        q.stride(0),
        q.stride(1),
        keys.stride(0),
        keys.stride(1),
        block_tables.stride(0),
        **decode_constants(num_heads // num_kv_heads, head_dim, block_size, is_wide, softcap > 0, has_codes),
    )
    combine_kernel[num_sequences, num_heads](
        sums, stats, context_lens, sinks, out, window, num_splits, **combine_constants(head_dim)
    )
    return out


def decode_constants(
    group: int, head_dim: int, block_size: int, is_wide: bool, has_softcap: bool = False, has_codes: bool = False
) -> dict[str, Any]:
    """The constants of the first kernel.

    group: query heads of a key-value head. is_wide: float32 is among it. has_codes: the cache is of int8.
    """
    return {
        "HAS_SOFTCAP": has_softcap,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        # Tensor cores take at least sixteen of each.
        "BLOCK_M": max(16, triton.next_power_of_2(group)),
        # Codes are loaded by four, whose places take the registers of more keys.
        "BLOCK_N": 16 if is_wide or has_codes else 64,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "num_warps": 4,
        # Registers that a third stage of float32 takes are those of a softcap.
        "num_stages": 2 if is_wide and has_softcap else 3,
    }


def combine_constants(head_dim: int) -> dict[str, Any]:
    """The constants of the second kernel."""
    return {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "num_warps": 1}


# A step's longest context decides on it: one that is 1 or a multiple of 16 would be a kernel of its own.
@triton.jit(do_not_specialize=["stride_bm"])
def decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    block_table_ptr,
    context_len_ptr,
    sums_ptr,
    stats_ptr,
    scale,
    softcap,
    window,
    stride_qm,
    stride_qh,
    stride_ks,
    stride_kh,
    stride_bm,
    HAS_SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: all query heads of one key-value head of a sequence, one split of its keys.

    Writes the weighted sum of the values, not yet divided by the sum of the weights, and (largest score, sum).
    """
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_len_ptr + sequence)
    first_key, split_size = _splits(context, window)
    start = first_key + split * split_size
    if start >= context:
        return
    end = tl.minimum(start + split_size, context)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    row_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = q_ptr + sequence * stride_qm + heads[:, None] * stride_qh + dims[None, :]
    q = tl.load(q_tile, mask=row_mask, other=0.0)
    table = block_table_ptr + sequence * stride_bm

    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for position in range(start, end, BLOCK_N):
        positions = position + tl.arange(0, BLOCK_N)
        is_key = positions < end
        block = tl.load(table + positions // BLOCK_SIZE, mask=is_key, other=0)
        slots = block * BLOCK_SIZE + positions % BLOCK_SIZE
        places = slots * stride_ks + kv_head * stride_kh
        k_mask = (dims < HEAD_DIM)[:, None] & is_key[None, :]
        k = tl.load(keys_ptr + places[None, :] + dims[:, None], mask=k_mask, other=0.0)
        scores = exact_dot(q, k, tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
        if keys_ptr.dtype.element_ty == tl.int8:
            scores *= load_row_scales(keys_ptr + places, is_key, HEAD_DIM)[None, :]
        # The hardware has base-2 exponentials.
        if HAS_SOFTCAP:
            scores = tanh(scores * (scale / softcap)) * (softcap * LOG2_OF_E)
        else:
            scores *= scale * LOG2_OF_E
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        weight_sum = weight_sum * shrink + tl.sum(weights, 1)
        # Masked, because zero times the content of an unwritten slot may not be zero.
        v_mask = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        v = tl.load(values_ptr + places[:, None] + dims[None, :], mask=v_mask, other=0.0)
        if values_ptr.dtype.element_ty == tl.int8:
            weights *= load_row_scales(values_ptr + places, is_key, HEAD_DIM)[None, :]
        total = _add_weighted(weights, v, total * shrink[:, None])
        top = new_top

    part = (sequence * tl.num_programs(1) * GROUP + heads) * tl.num_programs(2) + split
    tl.store(sums_ptr + part[:, None] * HEAD_DIM + dims[None, :], total, mask=row_mask)
    tl.store(stats_ptr + part * 2, top, mask=rows < GROUP)
    tl.store(stats_ptr + part * 2 + 1, weight_sum, mask=rows < GROUP)


@triton.jit
def _add_weighted(weights, values, total):
    """total + weights @ values. Beside float16 values two tiles of float16 hold 22 bits of weights up to one."""
    if values.dtype == tl.float16:
        high = weights.to(tl.float16)
        low = (weights - high.to(tl.float32)).to(tl.float16)
        return exact_dot(high, values, exact_dot(low, values, total))
    return exact_dot(weights, values, total)


# As in `decode_kernel`.
@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    sums_ptr,
    stats_ptr,
    context_len_ptr,
    sinks_ptr,
    out_ptr,
    window,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: the splits of one query head, added in order to its sink, where sinks_ptr is not None."""
    sequence = tl.program_id(0).to(tl.int64)
    row = sequence * tl.num_programs(1) + tl.program_id(1)
    context = tl.load(context_len_ptr + sequence)
    first_key, split_size = _splits(context, window)
    num_used = (context - first_key + split_size - 1) // split_size
    dims = tl.arange(0, BLOCK_D)
    if sinks_ptr is None:
        top = float("-inf")
        weight_sum = 0.0
    else:
        top = tl.load(sinks_ptr + tl.program_id(1)).to(tl.float32) * LOG2_OF_E
        weight_sum = 1.0
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for split in range(num_used):
        part = row * num_splits + split
        split_top = tl.load(stats_ptr + part * 2)
        new_top = tl.maximum(top, split_top)
        shrink = tl.exp2(top - new_top)
        grow = tl.exp2(split_top - new_top)
        split_total = tl.load(sums_ptr + part * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        total = total * shrink + split_total * grow
        weight_sum = weight_sum * shrink + tl.load(stats_ptr + part * 2 + 1) * grow
        top = new_top
    result = (total / weight_sum).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


@triton.jit
def _splits(context, window):
    """The first key that is seen, and the keys of one split."""
    first_key = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    length = context - first_key
    return first_key, tl.maximum((length + MAX_SPLITS - 1) // MAX_SPLITS, MIN_SPLIT_SIZE)
