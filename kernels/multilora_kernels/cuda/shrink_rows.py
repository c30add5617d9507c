"""`lora_shrink` of steps without prompts on a GPU, in OpenAI Triton: each row reads the adapter of its own.

A step of decodes has few rows of many adapters, and the time that it takes is that of reading these. A program is a row
and a part of the hidden size (`parts.py`). All that it reads of A is asked for at once, as wide as can be, and is
multiplied without tensor cores, which take sixteen rows of an adapter. So nothing is sorted, and a row's bits depend on
the row and its adapter alone.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from multilora_kernels.cuda.block_sizes import BlockSizes
from multilora_kernels.cuda.codes import code_values, header_bytes, load_int4
from multilora_kernels.cuda.integers import next_power_of_2
from multilora_kernels.parts import PART_SIZE


def shrink_rows_constants(in_features: int, is_wide: bool, sizes: BlockSizes, code_bits: int = 0) -> dict[str, Any]:
    """The constants and options of the kernel. is_wide: adapters are float32. code_bits: as of `shrink_constants`."""
    return sizes | {
        "PART_SIZE": PART_SIZE,
        "BLOCK_K": min(PART_SIZE, max(16, next_power_of_2(in_features))),
        # Twice the bytes, or for 4 bits the values and their scales: half of the tile stays within the registers.
        "BLOCK_R": max(1, sizes["BLOCK_R"] // (2 if is_wide or code_bits == 4 else 1)),
        "CODE_BITS": code_bits,
    }


# As in `shrink_kernel`.
@triton.jit(do_not_specialize=["first_slice"])
def shrink_rows_kernel(
    x_ptr,
    arena_ptr,
    rank_ptr,
    a_offset_ptr,
    mapping_ptr,
    v_ptr,
    in_features,
    num_columns,
    first_slice,
    stride_xm,
    stride_vp,
    stride_vs,
    stride_vm,
    PART_SIZE: tl.constexpr,
    RANK_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """One program: a row, one slice, one part of the hidden size, every RANK_SPLITS-th block of ranks."""
    row = tl.program_id(0).to(tl.int64)
    lora_index = tl.load(mapping_ptr + row)
    if lora_index < 0:
        return
    slice_index = tl.program_id(2)
    column = lora_index.to(tl.int64) * num_columns + first_slice + slice_index
    rank = tl.load(rank_ptr + column)
    offset = tl.load(a_offset_ptr + column)
    part = tl.program_id(1) // RANK_SPLITS
    ks = part * PART_SIZE + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row * stride_xm + ks, mask=ks < in_features, other=0.0).to(tl.float32)
    first_rank = tl.program_id(1) % RANK_SPLITS * BLOCK_R
    v_row = v_ptr + part * stride_vp + slice_index * stride_vs + row * stride_vm
    # As in `shrink_kernel`: adapters of the engine start at 64-byte boundaries, and saying so gives 16-byte loads.
    if offset % 16 == 0:
        _shrink(
            x, arena_ptr, offset // 16 * 16, v_row, rank, first_rank, ks, in_features,
            BLOCK_R, BLOCK_R * RANK_SPLITS, CODE_BITS,
        )  # fmt: skip
    else:
        _shrink(
            x, arena_ptr, offset, v_row, rank, first_rank, ks, in_features,
            BLOCK_R, BLOCK_R * RANK_SPLITS, CODE_BITS,
        )  # fmt: skip


@triton.jit
def _shrink(
    x,
    arena_ptr,
    offset,
    v_row,
    rank,
    first_rank,
    ks,
    in_features,
    BLOCK_R: tl.constexpr,
    STEP: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """Write BLOCK_R ranks from `first_rank` on, the next ones STEP further on, and so on."""
    a_ptr = arena_ptr + offset
    k_mask = (ks < in_features)[None, :]
    for first in range(first_rank, rank, STEP):
        ranks = first + tl.arange(0, BLOCK_R)
        mask = (ranks < rank)[:, None] & k_mask
        if CODE_BITS == 4:
            columns = (in_features + 15) // 16
            a = load_int4(a_ptr, ranks[:, None], ks[None, :] // 16, ks[None, :] % 16, columns, mask, False)
        elif CODE_BITS == 8:
            codes_ptr = a_ptr + header_bytes(rank)
            a = code_values(tl.load(codes_ptr + ranks.to(tl.int64)[:, None] * in_features + ks[None, :], mask, other=0))
        else:
            a = tl.load(a_ptr + ranks.to(tl.int64)[:, None] * in_features + ks[None, :], mask, other=0.0)
        total = tl.sum(a.to(tl.float32) * x[None, :], 1)
        if CODE_BITS == 8:
            scales_ptr = a_ptr.to(tl.pointer_type(tl.float32))
            total *= tl.load(scales_ptr + ranks, mask=ranks < rank, other=0.0)
        tl.store(v_row + ranks, total, mask=ranks < rank)
