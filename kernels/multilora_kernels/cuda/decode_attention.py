"""Attention of decoding sequences, one query each over the paged cache, in one launch with the steps before it.

A long context is cut into splits (flash-decoding, pytorch.org/blog/flash-decoding). A program takes one split, or where
many sequences decode some neighbouring ones, one after another. The last program of a sequence's key-value head to end
adds the splits, in their order. The cuts depend only on the sequence's own context, so its bits do not depend on the
rest of the batch. Each program rotates the queries that it needs. The program of the newest key first rotates and
stores this key, so that no program reads another's keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from multilora_kernels.cuda.block_sizes import BlockSizes, attention_sizes, capability, key_kind
from multilora_kernels.cuda.dependent_launch import dependent_constants, launches_dependently
from multilora_kernels.cuda.integers import cdiv, next_power_of_2
from multilora_kernels.cuda.key_tiles import add_keys, dims_of_tile, load_slots, no_values
from multilora_kernels.cuda.kv_rows import parts_of, store_rows
from multilora_kernels.cuda.rotation import load_turned
from multilora_kernels.cuda.tiles import LOG2_OF_E
from multilora_kernels.kv_rows import KVRows, kv_head_dim
from multilora_kernels.streams import MAX_COUNTERS, counters

_MAX_SPLITS = tl.constexpr(16)
"""Sixteen splits of eight key-value heads fill a GPU even when one sequence decodes alone."""

_PROGRAMS = 1024
"""About so many programs fill a GPU some times over. Each program more begins and ends once more, and of those that a
captured step launches many find no keys.
"""

_ADDED_AT_ONCE = tl.constexpr(4)
"""Splits whose loads do not wait for one another."""


def decode(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: KVRows,
    values: KVRows,
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
    sizes: BlockSizes | None = None,
) -> Any:
    """The rows of `out` of the first `num_decodes` sequences, as `attention.rotary_attention` says; others stay.

    sizes: to try in place of the table's. Returns the compiled kernel; None in the interpreter.
    """
    (key_rows, key_scales), (value_rows, value_scales) = parts_of(keys), parts_of(values)
    num_sequences, num_kv_heads, head_dim = num_decodes, key_rows.shape[1], kv_head_dim(keys)
    group = qkv.shape[1] // head_dim // num_kv_heads - 2
    assert num_sequences * num_kv_heads <= MAX_COUNTERS
    shape = (key_kind(qkv.dtype, keys.dtype), group, head_dim, capability(qkv.device))
    sizes = sizes or attention_sizes("decode_attention", *shape)
    constants = decode_constants(sizes, group, head_dim, cos.shape[2], block_size, softcap > 0, is_interleaved)
    split_tiles = sizes["SPLIT_KEYS"] // constants["BLOCK_N"]
    num_splits = _most_splits(block_tables.shape[1] * block_size, window, constants["BLOCK_N"], split_tiles)
    programs = max(1, min(num_splits, _PROGRAMS // (num_sequences * num_kv_heads)))
    # One program that takes all splits adds them in registers.
    parts = (num_sequences, num_kv_heads * group, num_splits if programs > 1 else 0)
    sums = qkv.new_empty(*parts, head_dim, dtype=torch.float32)
    stats = qkv.new_empty(*parts, 2, dtype=torch.float32)
    return decode_kernel[num_sequences, num_kv_heads, programs](
        qkv,
        cos,
        sin,
        key_rows,
        value_rows,
        key_scales,
        value_scales,
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
        num_splits,
        split_tiles,
        qkv.stride(0),
        cos.stride(0),
        key_rows.stride(0),
        key_rows.stride(1),
        0 if key_scales is None else key_scales.stride(0),
        block_tables.stride(0),
        **constants,
        **dependent_constants(launches_dependently(qkv.device)),
    )


def _most_splits(max_keys: int, window: int, tile: int, split_tiles: int) -> int:
    """Of any sequence of at most so many keys."""
    # The first of a window's keys may lie anywhere in its tile.
    num_tiles = cdiv(min(window + tile if window else max_keys, max_keys), tile)
    return min(int(_MAX_SPLITS.value), cdiv(num_tiles, split_tiles))


def decode_constants(
    sizes: BlockSizes,
    group: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    has_softcap: bool = False,
    is_interleaved: bool = False,
) -> dict[str, Any]:
    """The constants of the kernel. group: query heads of a key-value head."""
    return {
        "HAS_SOFTCAP": has_softcap,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "IS_INTERLEAVED": is_interleaved,
        "BLOCK_SIZE": block_size,
        # Tensor cores take at least sixteen of each.
        "BLOCK_M": max(16, next_power_of_2(group)),
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        # Addresses of several blocks take registers.
        "BLOCK_N": min(sizes["BLOCK_N"], max(16, next_power_of_2(block_size))),
        **{name: size for name, size in sizes.items() if name not in ("BLOCK_N", "SPLIT_KEYS")},
    }


# A step's longest context decides on it: one that is 1 or a multiple of 16 would be a kernel of its own.
@triton.jit(do_not_specialize=["stride_bm", "num_distances", "num_splits", "split_tiles"])
def decode_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
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
    num_splits,
    split_tiles,
    stride_xm,
    stride_cm,
    stride_ks,
    stride_kh,
    stride_sh,
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
    IS_DEPENDENT: tl.constexpr,
):
    """One program: all query heads of one key-value head of a sequence, some splits of its keys."""
    if IS_DEPENDENT:
        gdc_wait()
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    token = tl.load(query_start_ptr + sequence)
    context = tl.load(context_len_ptr + sequence)
    first_key = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    # Tiles begin at multiples of their size.
    before = first_key // BLOCK_N
    num_tiles = (context + BLOCK_N - 1) // BLOCK_N - before
    split_tiles = tl.maximum((num_tiles + _MAX_SPLITS - 1) // _MAX_SPLITS, split_tiles)
    num_used = (num_tiles + split_tiles - 1) // split_tiles
    taken = (num_used + tl.num_programs(2) - 1) // tl.num_programs(2)
    split = tl.program_id(2) * taken
    if split >= num_used:
        return
    has_all = taken == num_used
    first_tile = before + split * split_tiles
    end_tile = before + tl.minimum((split + taken) * split_tiles, num_tiles)
    table = block_table_ptr + sequence * stride_bm
    slots = load_slots(table, first_tile * BLOCK_N, context, first_key, BLOCK_N, BLOCK_SIZE)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    num_heads = tl.num_programs(1) * GROUP
    x_row = qkv_ptr + token * stride_xm
    cos_row, sin_row = cos_ptr + token * stride_cm, sin_ptr + token * stride_cm
    if end_tile == before + num_tiles:
        new = x_row + (num_heads + kv_head) * HEAD_DIM
        one = tl.zeros((1,), dtype=tl.int32)
        slot = tl.load(slot_ptr + token) + one
        place, scale_place = slot * stride_ks + kv_head * stride_kh, slot + kv_head * stride_sh
        k = load_turned(new, dims[None, :], cos_row, sin_row, True, HEAD_DIM, ROTARY_DIM, IS_INTERLEAVED)
        store_rows(keys_ptr, key_scales_ptr, place, scale_place, k, dims, one == 0, HEAD_DIM)
        new += tl.num_programs(1) * HEAD_DIM
        v = tl.load(new + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)
        store_rows(values_ptr, value_scales_ptr, place, scale_place, v, dims, one == 0, HEAD_DIM)
        # Other threads read them below.
        tl.debug_barrier()
    is_head = rows < GROUP
    q_rows = (x_row + heads * HEAD_DIM)[:, None]
    q = load_turned(q_rows, dims[None, :], cos_row, sin_row, is_head[:, None], HEAD_DIM, ROTARY_DIM, IS_INTERLEAVED)
    bias_rows = tl.where(is_head, heads, 0) * num_distances
    queries = tl.full((BLOCK_M,), context - 1, dtype=tl.int64)

    if sinks_ptr is None:
        all_top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        all_weights = tl.zeros((BLOCK_M,), dtype=tl.float32)
    else:
        all_top = tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_OF_E
        all_weights = tl.full((BLOCK_M,), 1.0, dtype=tl.float32)
    TILES: tl.constexpr = 1 if value_scales_ptr is None else 2
    results = no_values(BLOCK_M, BLOCK_D, TILES)
    # The results of a split: the weighted sum of its values, its largest score, and the sum of its weights.
    totals = no_values(BLOCK_M, BLOCK_D, TILES)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    keys_ptr += kv_head * stride_kh
    values_ptr += kv_head * stride_kh
    if key_scales_ptr is not None:
        key_scales_ptr += kv_head * stride_sh
        value_scales_ptr += kv_head * stride_sh
    left = split_tiles
    # One loop over the tiles of all splits: the loads of a split's first tiles do not wait for the end of another.
    for tile in range(first_tile, end_tile):
        position = tile * BLOCK_N
        next_slots = load_slots(table, position + BLOCK_N, context, first_key, BLOCK_N, BLOCK_SIZE)
        positions = position + tl.arange(0, BLOCK_N)
        is_key = (positions >= first_key) & (positions < context)
        totals, top, weight_sum = add_keys(
            totals, top, weight_sum, q, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slots, positions,
            is_key, None, 0, distance_bias_ptr, bias_rows, num_distances, queries, dims, stride_ks, scale, softcap,
            HAS_SOFTCAP, HEAD_DIM, BLOCK_N, BLOCK_SIZE, tl.float32,
        )  # fmt: skip
        slots = next_slots
        left -= 1
        if (left == 0) | (tile + 1 == end_tile):
            if has_all:
                results, all_top, all_weights = _added(results, all_top, all_weights, totals, top, weight_sum, TILES)
            else:
                part = (sequence * num_heads + heads) * num_splits + split
                for i in tl.static_range(TILES):
                    out_dims = dims_of_tile(i, BLOCK_D, TILES)
                    mask = is_head[:, None] & (out_dims < HEAD_DIM)[None, :]
                    tl.store(sums_ptr + part[:, None] * HEAD_DIM + out_dims[None, :], totals[i], mask=mask)
                tl.store(stats_ptr + part * 2, top, mask=is_head)
                tl.store(stats_ptr + part * 2 + 1, weight_sum, mask=is_head)
            totals = no_values(BLOCK_M, BLOCK_D, TILES)
            top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
            weight_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
            left = split_tiles
            split += 1

    is_last = has_all
    if taken < num_used:
        # What all threads have written is there for the program that sees the last number.
        tl.debug_barrier()
        arrival = arrival_ptr + sequence * tl.num_programs(1) + kv_head
        is_last = tl.atomic_add(arrival, 1, sem="acq_rel") == (num_used + taken - 1) // taken - 1
        if is_last:
            tl.store(arrival, 0)
            for first in range(0, num_used, _ADDED_AT_ONCE):
                for other in tl.static_range(_ADDED_AT_ONCE):
                    is_there = first + other < num_used
                    part = (sequence * num_heads + heads) * num_splits + first + other
                    # Past the first cache, which knows nothing of what other programs write. A split that is not there
                    # weighs nothing.
                    top = tl.load(
                        stats_ptr + part * 2, mask=is_head & is_there, other=float("-inf"), cache_modifier=".cg"
                    )
                    weight_sum = tl.load(
                        stats_ptr + part * 2 + 1, mask=is_head & is_there, other=0.0, cache_modifier=".cg"
                    )
                    sums = sums_ptr + part[:, None] * HEAD_DIM
                    totals = (_load_sums(sums, is_head & is_there, 0, HEAD_DIM, BLOCK_D, TILES),)
                    if TILES == 2:
                        totals = (totals[0], _load_sums(sums, is_head & is_there, 1, HEAD_DIM, BLOCK_D, TILES))
                    top = tl.where(is_head, top, 0.0)
                    results, all_top, all_weights = _added(
                        results, all_top, all_weights, totals, top, weight_sum, TILES
                    )
    if is_last:
        for i in tl.static_range(TILES):
            out_dims = dims_of_tile(i, BLOCK_D, TILES)
            mask = is_head[:, None] & (out_dims < HEAD_DIM)[None, :]
            attended = (results[i] / all_weights[:, None]).to(out_ptr.dtype.element_ty)
            out_rows = out_ptr + (token * num_heads + heads) * HEAD_DIM
            tl.store(out_rows[:, None] + out_dims[None, :], attended, mask=mask)


@triton.jit
def _load_sums(rows, is_row, tile: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr):
    dims = dims_of_tile(tile, BLOCK_D, TILES)[None, :]
    return tl.load(rows + dims, mask=is_row[:, None] & (dims < HEAD_DIM), other=0.0, cache_modifier=".cg")


@triton.jit
def _added(results, all_top, all_weights, totals, top, weight_sum, TILES: tl.constexpr):
    """A split more in the sums of those before. Fused operations are spelt out: in registers and from memory, the bits
    are the same.
    """
    new_top = tl.maximum(all_top, top)
    shrink = tl.exp2(all_top - new_top)
    grow = tl.exp2(top - new_top)
    all_weights = tl.fma(all_weights, shrink, weight_sum * grow)
    shrink, grow = shrink[:, None], grow[:, None]
    first = tl.fma(results[0], shrink, totals[0] * grow)
    if TILES == 1:
        return (first,), new_top, all_weights
    else:
        return (first, tl.fma(results[1], shrink, totals[1] * grow)), new_top, all_weights
