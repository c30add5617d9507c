"""Attention of decoding sequences, one query each over the paged cache, in one launch with the steps before it.

A long context is cut into splits, each with a program of its own (flash-decoding, pytorch.org/blog/flash-decoding). The
last program of a sequence's key-value head to end adds the splits, in their order. The cuts depend only on the
sequence's own context, so its bits do not depend on the rest of the batch. Each program rotates the queries that it
needs. The program of the newest key first rotates and stores this key, so that no program reads another's keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.cuda.integers import cdiv, next_power_of_2
from multilora_kernels.cuda.key_tiles import add_keys
from multilora_kernels.cuda.kv_rows import store_row
from multilora_kernels.cuda.rotation import load_turned
from multilora_kernels.cuda.tiles import LOG2_OF_E
from multilora_kernels.kv_rows import kv_head_dim
from multilora_kernels.streams import MAX_COUNTERS, counters

MAX_SPLITS = tl.constexpr(16)
"""Sixteen splits of eight key-value heads fill a GPU even when one sequence decodes alone."""

MIN_SPLIT_SIZE = tl.constexpr(256)
"""The keys of the smallest split. Fewer would not pay for their share of the adding."""


def decode(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    num_decodes: int,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    distance_bias: torch.Tensor | None,
    is_interleaved: bool,
) -> None:
    """The rows of `out` of the first `num_decodes` sequences, as `attention.rotary_attention` says; others stay."""
    num_sequences, num_kv_heads, head_dim = num_decodes, keys.shape[1], kv_head_dim(keys)
    group = qkv.shape[1] // head_dim // num_kv_heads - 2
    assert num_sequences * num_kv_heads <= MAX_COUNTERS
    max_keys = block_tables.shape[1] * block_size
    num_splits = min(MAX_SPLITS.value, cdiv(min(window or max_keys, max_keys), MIN_SPLIT_SIZE.value))
    sums = qkv.new_empty(num_sequences, num_kv_heads * group, num_splits, head_dim, dtype=torch.float32)
    stats = qkv.new_empty(num_sequences, num_kv_heads * group, num_splits, 2, dtype=torch.float32)
    is_wide = torch.float32 in (qkv.dtype, keys.dtype)
    constants = decode_constants(
        group, head_dim, cos.shape[2], block_size, is_wide, softcap > 0, keys.dtype == torch.int8, is_interleaved
    )
    decode_kernel[num_sequences, num_kv_heads, num_splits](
        qkv,
        cos,
        sin,
        keys,
        values,
        slots,
        block_tables,
        query_starts,
        context_lens,
        sums,
        stats,
        counters(qkv.device),
        sinks,
        distance_bias,
        out,
        scale,
        softcap,
        window,
        0 if distance_bias is None else distance_bias.shape[1],
        qkv.stride(0),
        cos.stride(0),
        keys.stride(0),
        keys.stride(1),
        block_tables.stride(0),
        **constants,
    )


def decode_constants(
    group: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    is_wide: bool,
    has_softcap: bool = False,
    has_codes: bool = False,
    is_interleaved: bool = False,
) -> dict[str, Any]:
    """The constants of the kernel.

    group: query heads of a key-value head. is_wide: float32 is among it. has_codes: the cache is of int8.
    """
    block_d = max(16, next_power_of_2(head_dim))
    return {
        "HAS_SOFTCAP": has_softcap,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "IS_INTERLEAVED": is_interleaved,
        "BLOCK_SIZE": block_size,
        # Tensor cores take at least sixteen of each.
        "BLOCK_M": max(16, next_power_of_2(group)),
        # Codes are loaded by four, whose places take the registers of more keys.
        "BLOCK_N": 16 if is_wide or has_codes else 64,
        "BLOCK_D": block_d,
        "num_warps": 4 if block_d <= 128 else 8,
        # Registers that a further stage of float32 takes are those of a softcap, or of a wide head.
        "num_stages": 3 if not is_wide else 1 if block_d > 128 else 2 if has_softcap else 3,
    }


# A step's longest context decides on it: one that is 1 or a multiple of 16 would be a kernel of its own.
@triton.jit(do_not_specialize=["stride_bm", "num_distances"])
def decode_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    slot_ptr,
    block_table_ptr,
    query_start_ptr,
    context_len_ptr,
    sums_ptr,
    stats_ptr,
    arrival_ptr,
    sinks_ptr,
    distance_bias_ptr,
    out_ptr,
    scale,
    softcap,
    window,
    num_distances,
    stride_xm,
    stride_cm,
    stride_ks,
    stride_kh,
    stride_bm,
    HAS_SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: all query heads of one key-value head of a sequence, one split of its keys."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start_ptr + sequence)
    context = tl.load(context_len_ptr + sequence)
    first_key, split_size = _splits(context, window)
    start = first_key + split * split_size
    if start >= context:
        return
    end = tl.minimum(start + split_size, context)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    num_heads = tl.num_programs(1) * GROUP
    x_row = qkv_ptr + token * stride_xm
    cos_row, sin_row = cos_ptr + token * stride_cm, sin_ptr + token * stride_cm
    if end == context:
        new = x_row + (num_heads + kv_head) * HEAD_DIM
        place = tl.load(slot_ptr + token) * stride_ks + kv_head * stride_kh
        k = load_turned(new, dims, cos_row, sin_row, True, HEAD_DIM, ROTARY_DIM, IS_INTERLEAVED)
        store_row(keys_ptr + place, k, dims, HEAD_DIM)
        v = tl.load(new + tl.num_programs(1) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        store_row(values_ptr + place, v, dims, HEAD_DIM)
        # Other threads read them below.
        tl.debug_barrier()
    q_rows = (x_row + heads * HEAD_DIM)[:, None]
    is_head = (rows < GROUP)[:, None]
    q = load_turned(q_rows, dims[None, :], cos_row, sin_row, is_head, HEAD_DIM, ROTARY_DIM, IS_INTERLEAVED)
    table = block_table_ptr + sequence * stride_bm
    bias_rows = tl.where(rows < GROUP, heads, 0) * num_distances
    queries = tl.full((BLOCK_M,), context - 1, dtype=tl.int64)

    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for position in range(start, end, BLOCK_N):
        positions = position + tl.arange(0, BLOCK_N)
        is_key = positions < end
        total, top, weight_sum = add_keys(
            total, top, weight_sum, q, keys_ptr, values_ptr, table, positions, is_key, None, 0,
            distance_bias_ptr, bias_rows, num_distances, queries, dims, kv_head, stride_ks, stride_kh, scale, softcap,
            HAS_SOFTCAP, HEAD_DIM, BLOCK_SIZE, tl.float32,
        )  # fmt: skip

    tile_mask = is_head & (dims < HEAD_DIM)[None, :]
    num_used = (context - first_key + split_size - 1) // split_size
    is_last = num_used == 1
    if num_used > 1:
        # The results of a split: the weighted sum of its values, its largest score, and the sum of its weights.
        part = (sequence * num_heads + heads) * tl.num_programs(2) + split
        tl.store(sums_ptr + part[:, None] * HEAD_DIM + dims[None, :], total, mask=tile_mask)
        tl.store(stats_ptr + part * 2, top, mask=rows < GROUP)
        tl.store(stats_ptr + part * 2 + 1, weight_sum, mask=rows < GROUP)
        # What all threads have written is there for the program that sees the last number.
        tl.debug_barrier()
        arrival = arrival_ptr + sequence * tl.num_programs(1) + kv_head
        is_last = tl.atomic_add(arrival, 1, sem="acq_rel") == num_used - 1
        if is_last:
            tl.store(arrival, 0)
    if is_last:
        if sinks_ptr is None:
            all_top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
            all_weights = tl.zeros((BLOCK_M,), dtype=tl.float32)
        else:
            all_top = tl.load(sinks_ptr + heads, mask=rows < GROUP, other=0.0).to(tl.float32) * LOG2_OF_E
            all_weights = tl.full((BLOCK_M,), 1.0, dtype=tl.float32)
        result = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        if num_used > 1:
            for other in range(num_used):
                part = (sequence * num_heads + heads) * tl.num_programs(2) + other
                # Past the first cache, which knows nothing of what other programs write.
                top = tl.load(stats_ptr + part * 2, mask=rows < GROUP, other=0.0, cache_modifier=".cg")
                weight_sum = tl.load(stats_ptr + part * 2 + 1, mask=rows < GROUP, other=1.0, cache_modifier=".cg")
                sums = sums_ptr + part[:, None] * HEAD_DIM + dims[None, :]
                total = tl.load(sums, mask=tile_mask, other=0.0, cache_modifier=".cg")
                result, all_top, all_weights = _added(result, all_top, all_weights, total, top, weight_sum)
        else:
            result, all_top, all_weights = _added(result, all_top, all_weights, total, top, weight_sum)
        result = (result / all_weights[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :], result, mask=tile_mask)


@triton.jit
def _added(result, all_top, all_weights, total, top, weight_sum):
    """A split more in the sums of those before."""
    new_top = tl.maximum(all_top, top)
    shrink = tl.exp2(all_top - new_top)
    grow = tl.exp2(top - new_top)
    result = result * shrink[:, None] + total * grow[:, None]
    return result, new_top, all_weights * shrink + weight_sum * grow


@triton.jit
def _splits(context, window):
    """The first key that is seen, and the keys of one split."""
    first_key = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    length = context - first_key
    return first_key, tl.maximum((length + MAX_SPLITS - 1) // MAX_SPLITS, MIN_SPLIT_SIZE)
