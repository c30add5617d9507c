"""`lora_expand` on a GPU, in OpenAI Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.adapter_codes import CODE_BITS
from multilora_kernels.cuda.block_sizes import MIN_BLOCK_R, BlockSizes, block_sizes, capability
from multilora_kernels.cuda.codes import arena_of_kernels, load_int4, load_magnitude, load_panel_scales, panel_codes
from multilora_kernels.cuda.expand_rows import expand_rows, locate
from multilora_kernels.cuda.integers import cdiv
from multilora_kernels.cuda.tiles import exact_dot
from multilora_kernels.segments import ROWS, LoRASegments
from multilora_kernels.tables import LoRATables

_PROGRAMS = 512
"""About so many programs fill a GPU once."""

_MOST_BLOCKS = 8
"""Of outputs, that a program takes one after another. Its adapter, its rows and their v are looked up once for all."""


def lora_expand(
    v: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
    sizes: BlockSizes | None = None,
) -> None:
    """See `multilora_kernels.expand.lora_expand`. sizes: to try others than the table's."""
    if segments.chunk_size == ROWS:
        expand_rows(v, y, tables, first_slice, slice_sizes, segments, sizes)
        return
    assert y.stride(1) == 1
    shape = (segments.chunk_size, tables.max_rank, capability(y.device), sum(slice_sizes), len(y))
    sizes = sizes or block_sizes("expand", *shape)
    code_bits = CODE_BITS.get(tables.arena.dtype, 0)
    is_wide = is_wide_tile(y.dtype, tables.arena.dtype)
    constants = expand_constants(
        v.shape[0], slice_sizes, segments.chunk_size, tables.max_rank, is_wide, sizes, code_bits
    )
    blocks = blocks_of_a_program(slice_sizes, constants, len(y))
    num_programs = sum(cdiv(size, blocks * constants["BLOCK_N"]) for size in slice_sizes)
    expand_kernel[segments.chunk_start.numel(), num_programs](
        v,
        y,
        arena_of_kernels(tables.arena),
        tables.rank,
        tables.b_offset,
        tables.magnitude_offset,
        segments.permutation,
        segments.chunk_start,
        segments.chunk_length,
        segments.chunk_lora_index,
        tables.rank.shape[1],
        first_slice,
        blocks,
        v.stride(0),
        v.stride(1),
        v.stride(2),
        y.stride(0),
        **constants,
    )


def is_wide_tile(dtype: torch.dtype, lora_dtype: torch.dtype) -> bool:
    """Whether numbers take twice the registers: float32, the values of codes of 4 bits, and products in TF32."""
    return torch.float32 in (dtype, lora_dtype) or lora_dtype in (torch.float16, torch.uint8)


def expand_constants(
    parts: int,
    slice_sizes: Sequence[int],
    chunk_size: int,
    max_rank: int,
    is_wide: bool,
    sizes: BlockSizes,
    code_bits: int = 0,
) -> dict[str, Any]:
    """The constants and options of the kernel. is_wide: as `is_wide_tile`. code_bits: as of `shrink_constants`."""
    block_r = sizes["BLOCK_R"]
    if is_wide or max_rank > block_r:
        # More would not stay within the registers.
        block_r = max(MIN_BLOCK_R, block_r // 2)
    return sizes | {
        "NUM_PARTS": parts,
        "SLICE_SIZES": tuple(slice_sizes),
        "BLOCK_M": chunk_size,
        "BLOCK_N": sizes["BLOCK_N"] // (2 if is_wide else 1),
        "BLOCK_R": block_r,
        "HAS_MORE_RANKS": max_rank > block_r,
        "CODE_BITS": code_bits,
    }


def blocks_of_a_program(slice_sizes: Sequence[int], constants: dict[str, Any], num_tokens: int) -> int:
    """How many blocks of outputs a program takes one after another: as many as leave programs that fill a GPU.

    The number of tokens decides, never their adapters.
    """
    num_blocks = sum(cdiv(size, constants["BLOCK_N"]) for size in slice_sizes)
    return max(1, min(_MOST_BLOCKS, cdiv(num_tokens, constants["BLOCK_M"]) * num_blocks // _PROGRAMS))


# As in `shrink_kernel`.
@triton.jit(do_not_specialize=["first_slice", "blocks"])
def expand_kernel(
    v_ptr,
    y_ptr,
    arena_ptr,
    rank_ptr,
    b_offset_ptr,
    magnitude_offset_ptr,
    permutation_ptr,
    chunk_start_ptr,
    chunk_length_ptr,
    chunk_lora_index_ptr,
    num_columns,
    first_slice,
    blocks,
    stride_vp,
    stride_vs,
    stride_vm,
    stride_ym,
    NUM_PARTS: tl.constexpr,
    SLICE_SIZES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_MORE_RANKS: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """One program: a chunk's tokens, `blocks` times BLOCK_N outputs of one slice, all ranks."""
    chunk = tl.program_id(0)
    # As in `shrink_kernel`: all that can be loaded at once is.
    length = tl.load(chunk_length_ptr + chunk)
    start = tl.load(chunk_start_ptr + chunk)
    lora_index = tl.load(chunk_lora_index_ptr + chunk)
    if length == 0:
        return
    span = blocks * BLOCK_N
    slice_index, slice_start, slice_size, first_output = locate(tl.program_id(1), SLICE_SIZES, span)
    column = lora_index.to(tl.int64) * num_columns + first_slice + slice_index
    rank = tl.load(rank_ptr + column)
    offset = tl.load(b_offset_ptr + column)
    magnitude_offset = tl.load(magnitude_offset_ptr + column)
    rows = tl.arange(0, BLOCK_M)
    row_mask = (rows < length)[:, None]
    tokens = tl.load(permutation_ptr + start + rows, mask=rows < length, other=0).to(tl.int64)[:, None]
    if rank == 0:
        return

    v_rows = v_ptr + slice_index * stride_vs + tokens * stride_vm
    y_rows = y_ptr + slice_start + tokens * stride_ym
    end = tl.minimum(first_output + span, slice_size)
    # With rank and place known to be multiples of eight, the loads are of 16 bytes. `tl.multiple_of` would mark the two
    # where they are loaded, and so for the other branch too; a product is a number of its own.
    if (rank % 8 == 0) & (offset % 8 == 0):
        _add_update(
            y_rows, v_rows, arena_ptr, offset // 8 * 8, magnitude_offset, rank // 8 * 8, row_mask, first_output, end,
            stride_vp, NUM_PARTS, BLOCK_M, BLOCK_N, BLOCK_R, HAS_MORE_RANKS, CODE_BITS,
        )  # fmt: skip
    else:
        _add_update(
            y_rows, v_rows, arena_ptr, offset, magnitude_offset, rank, row_mask, first_output, end,
            stride_vp, NUM_PARTS, BLOCK_M, BLOCK_N, BLOCK_R, HAS_MORE_RANKS, CODE_BITS,
        )  # fmt: skip


@triton.jit
def _add_update(
    y_rows,
    v_rows,
    arena_ptr,
    offset,
    magnitude_offset,
    rank,
    row_mask,
    first_output,
    end,
    stride_vp,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_MORE_RANKS: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """Add v B^T to the outputs first_output .. end of some rows of y, BLOCK_N at a time.

    The first ranks of v are kept. A block of y is asked for while the one before is computed: a program takes longer to
    wait for its few bytes than to multiply them.
    """
    b_ptr = arena_ptr + offset
    ranks = tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_N)
    y = tl.load(y_rows + (first_output + columns)[None, :], row_mask & (first_output + columns < end)[None, :], 0.0)
    v = _load_v(v_rows, ranks, rank, row_mask, stride_vp, NUM_PARTS, 1 if HAS_MORE_RANKS else 4)
    for first in range(first_output, end, BLOCK_N):
        outputs = first + columns
        is_output = outputs < end
        following = outputs + BLOCK_N
        next_y = tl.load(y_rows + following[None, :], mask=row_mask & (following < end)[None, :], other=0.0)
        b = load_b(b_ptr, ranks, outputs, rank, end, CODE_BITS)
        update = exact_dot(v, b, tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
        if HAS_MORE_RANKS:
            for first_rank in range(BLOCK_R, rank, BLOCK_R):
                b = load_b(b_ptr, first_rank + ranks, outputs, rank, end, CODE_BITS)
                more_v = _load_v(v_rows, first_rank + ranks, rank, row_mask, stride_vp, NUM_PARTS, 1)
                update = exact_dot(more_v, b, update)
        if CODE_BITS == 8:
            update *= load_panel_scales(b_ptr, outputs, rank, is_output)[None, :]
        total = y.to(tl.float32) + update
        if magnitude_offset >= 0:
            total *= load_magnitude(arena_ptr, magnitude_offset, outputs, is_output, CODE_BITS)[None, :]
        y_tile = y_rows + outputs[None, :]
        tl.store(y_tile, total.to(y.dtype), mask=row_mask & is_output[None, :])
        y = next_y


@triton.jit
def _load_v(v_rows, ranks, rank, row_mask, stride_vp, NUM_PARTS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum of the parts of v, [rows, ranks] float32."""
    mask = row_mask & (ranks < rank)[None, :]
    v = tl.load(v_rows + ranks[None, :], mask=mask, other=0.0)
    for part in tl.range(1, NUM_PARTS, loop_unroll_factor=AT_ONCE):
        v += tl.load(v_rows + part * stride_vp + ranks[None, :], mask=mask, other=0.0)
    return v


@triton.jit
def load_b(b_ptr, ranks, outputs, rank, end, CODE_BITS: tl.constexpr):
    """A tile of B, [ranks, outputs], zero from `rank` and `end` on; without the scales of 8 bits."""
    mask = (ranks < rank)[:, None] & (outputs < end)[None, :]
    if CODE_BITS == 0:
        b = tl.load(b_ptr + outputs.to(tl.int64)[None, :] * rank + ranks[:, None], mask=mask, other=0.0)
    elif CODE_BITS == 8:
        b = tl.load(panel_codes(b_ptr, ranks[:, None], outputs[None, :], rank), mask=mask, other=0)
    else:
        b = load_int4(b_ptr, outputs[None, :] // 16, ranks[:, None], outputs[None, :] % 16, rank, mask, True)
    return b
