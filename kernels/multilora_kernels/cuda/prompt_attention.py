"""Attention of any number of tokens of many sequences over the paged cache, in one launch (arXiv:2307.08691).

A program has some neighbouring tokens of one sequence, with all query heads of one key-value head. It looks for its
sequence itself, so the host needs to know nothing but the number of tokens, and a captured graph replays for any mix.
Keys come in tiles that begin at multiples of their size: a token's bits depend neither on its chunk nor on the batch.
Tiles that all queries of a program see whole are not masked.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.cuda.block_sizes import BlockSizes, attention_sizes, capability, key_kind
from multilora_kernels.cuda.integers import next_power_of_2
from multilora_kernels.cuda.key_tiles import RAISED, add_keys, dims_of_tile, load_slots, no_values
from multilora_kernels.cuda.kv_rows import parts_of
from multilora_kernels.cuda.tiles import LOG2_OF_E
from multilora_kernels.kv_rows import KVRows, kv_head_dim


def attend(
    q: torch.Tensor,
    keys: KVRows,
    values: KVRows,
    out: torch.Tensor,
    first_sequence: int,
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
    sizes: BlockSizes | None = None,
) -> Any:
    """The rows of `out` [num_tokens, num_heads * head_dim], as `attention.paged_attention` says.

    first_sequence: the sequences before it are left out. num_decodes: of no matter here. sizes: to try in place of the
    table's. Returns the compiled kernel; None in the interpreter.
    """
    num_tokens, num_heads, _ = q.shape
    (key_rows, key_scales), (value_rows, value_scales) = parts_of(keys), parts_of(values)
    num_kv_heads, head_dim = key_rows.shape[1], kv_head_dim(keys)
    assert q.stride(2) == key_rows.stride(2) == block_tables.stride(1) == 1
    assert key_rows.stride() == value_rows.stride()
    assert scale > 0
    group = num_heads // num_kv_heads
    shape = (key_kind(q.dtype, keys.dtype), group, head_dim, capability(q.device))
    sizes = sizes or attention_sizes("prompt_attention", *shape)
    constants = prompt_constants(sizes, group, head_dim, block_size, softcap > 0, window > 0)
    # Each sequence may begin a block of its own.
    num_blocks = num_tokens // constants["BLOCK_Q"] + len(block_tables)
    return prompt_kernel[(num_kv_heads * num_blocks,)](
        q,
        key_rows,
        value_rows,
        key_scales,
        value_scales,
        block_tables,
        query_starts,
        context_lens,
        sinks,
        distance_bias,
        out,
        scale,
        softcap,
        window,
        0 if distance_bias is None else distance_bias.shape[1],
        len(block_tables),
        first_sequence,
        num_kv_heads,
        num_blocks,
        q.stride(0),
        q.stride(1),
        key_rows.stride(0),
        key_rows.stride(1),
        0 if key_scales is None else key_scales.stride(0),
        block_tables.stride(0),
        **constants,
    )


def prompt_constants(
    sizes: BlockSizes,
    group: int,
    head_dim: int,
    block_size: int,
    has_softcap: bool = False,
    has_window: bool = False,
) -> dict[str, Any]:
    """The constants of the kernel, as `decode_attention.decode_constants` has them."""
    rows_of_token = next_power_of_2(group)
    block_m = max(rows_of_token, sizes["BLOCK_M"])
    return sizes | {
        "HAS_SOFTCAP": has_softcap,
        "HAS_WINDOW": has_window,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": block_m,
        "BLOCK_Q": block_m // rows_of_token,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        # Else the compiler might fuse in the loop without masks what it does not fuse in the other.
        "enable_fp_fusion": False,
    }


@triton.jit(do_not_specialize=["num_distances", "num_sequences", "first_sequence", "num_blocks", "stride_bm"])
def prompt_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_table_ptr,
    query_start_ptr,
    context_len_ptr,
    sinks_ptr,
    distance_bias_ptr,
    out_ptr,
    scale,
    softcap,
    window,
    num_distances,
    num_sequences,
    first_sequence,
    num_kv_heads,
    num_blocks,
    stride_qm,
    stride_qh,
    stride_ks,
    stride_kh,
    stride_sh,
    stride_bm,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_Q tokens of one sequence, all query heads of one key-value head."""
    # On the one axis that has more than 65,535 programs.
    kv_head = tl.program_id(0) % num_kv_heads
    # The last tokens of a sequence, which see most keys, come first: at the end all programs are short.
    block = num_blocks - 1 - tl.program_id(0) // num_kv_heads
    sequence, first = _locate(query_start_ptr, block, num_sequences, BLOCK_Q)
    query_start = tl.load(query_start_ptr + sequence)
    length = tl.load(query_start_ptr + sequence + 1) - query_start
    if (first >= length) | (sequence < first_sequence):
        return
    context = tl.load(context_len_ptr + sequence)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = first + rows // (BLOCK_M // BLOCK_Q)
    heads = kv_head * GROUP + rows % (BLOCK_M // BLOCK_Q)
    is_row = (queries < length) & (rows % (BLOCK_M // BLOCK_Q) < GROUP)
    tile_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = query_start + queries
    q_rows = q_ptr + tokens * stride_qm + heads * stride_qh
    q = tl.load(q_rows[:, None] + dims[None, :], mask=tile_mask, other=0.0)
    # Positions of the queries among the keys of their sequence.
    newest = context - length + queries
    end = tl.minimum(context, context - length + first + BLOCK_Q)
    # Keys that no query of the program sees may lie in blocks that the sequence has no more.
    first_key = tl.maximum(context - length + first - window + 1, 0) if HAS_WINDOW else 0
    start = first_key // BLOCK_N * BLOCK_N
    # All queries see all keys of the tiles from `middle` to `diagonal`.
    diagonal = (context - length + first + 1) // BLOCK_N * BLOCK_N
    middle = start
    if HAS_WINDOW:
        of_last_query = tl.maximum(context - length + first + BLOCK_Q - window, 0)
        middle = tl.minimum((of_last_query + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
    keys_ptr += kv_head * stride_kh
    values_ptr += kv_head * stride_kh
    if key_scales_ptr is not None:
        key_scales_ptr += kv_head * stride_sh
        value_scales_ptr += kv_head * stride_sh
    table = block_table_ptr + sequence * stride_bm
    bias_rows = tl.where(is_row, heads, 0) * num_distances

    # A sink is a key without a value.
    if sinks_ptr is None:
        top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        weight_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    else:
        top = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_OF_E
        weight_sum = tl.full((BLOCK_M,), 1.0, dtype=tl.float32)
    TILES: tl.constexpr = 1 if value_scales_ptr is None else 2
    totals = no_values(BLOCK_M, BLOCK_D, TILES)
    slots = load_slots(table, start, end, first_key, BLOCK_N, BLOCK_SIZE)
    for part in tl.static_range(0 if HAS_WINDOW else 1, 3):
        if part == 0:
            part_start, part_end = start, middle
        elif part == 1:
            part_start, part_end = middle, diagonal
        else:
            part_start, part_end = tl.maximum(middle, diagonal), end
        for position in range(part_start, part_end, BLOCK_N):
            next_slots = load_slots(table, position + BLOCK_N, end, first_key, BLOCK_N, BLOCK_SIZE)
            positions = position + tl.arange(0, BLOCK_N)
            is_key, newest_seen = None, None
            if part != 1:
                is_key, newest_seen = (positions >= first_key) & (positions < end), newest
            totals, top, weight_sum = add_keys(
                totals, top, weight_sum, q, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slots, positions,
                is_key, newest_seen, window, distance_bias_ptr, bias_rows, num_distances, newest, dims, stride_ks,
                scale, softcap, HAS_SOFTCAP, HEAD_DIM, BLOCK_N, BLOCK_SIZE, q.dtype,
            )  # fmt: skip
            slots = next_slots
    if value_scales_ptr is not None and q.dtype == tl.float16:
        weight_sum *= RAISED
    out_rows = out_ptr + (tokens * (num_kv_heads * GROUP) + heads) * HEAD_DIM
    for i in tl.static_range(TILES):
        out_dims = dims_of_tile(i, BLOCK_D, TILES)
        result = (totals[i] / weight_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_rows[:, None] + out_dims[None, :], result, mask=is_row[:, None] & (out_dims < HEAD_DIM)[None, :])


@triton.jit
def _locate(query_start_ptr, block, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence of a block of tokens, and the first of them in it. Sequence s has the blocks from
    query_starts[s] // BLOCK_Q + s on. Some of these may lie after its end.
    """
    low = 0
    high = num_sequences
    while low + 1 < high:
        middle = (low + high) // 2
        is_before = tl.load(query_start_ptr + middle) // BLOCK_Q + middle <= block
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    sequence = tl.full((), low, tl.int64)
    first = (block - tl.load(query_start_ptr + sequence) // BLOCK_Q - sequence) * BLOCK_Q
    return sequence, first
