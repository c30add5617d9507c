"""`lora_expand` on a GPU, in OpenAI Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.adapter_codes import CODE_BITS
from multilora_kernels.cuda.block_sizes import BlockSizes, block_sizes, capability
from multilora_kernels.cuda.codes import arena_of_kernels, load_int4, load_magnitude, load_panel_scales, panel_codes
from multilora_kernels.cuda.expand_rows import expand_rows, locate
from multilora_kernels.cuda.integers import cdiv
from multilora_kernels.cuda.tiles import exact_dot
from multilora_kernels.segments import CHUNK_SIZE, ROWS, LoRASegments
from multilora_kernels.tables import LoRATables

_DECODE_CHUNK = tl.constexpr(CHUNK_SIZE)


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
    constants = expand_constants(v.shape[0], slice_sizes, segments.chunk_size, sizes, code_bits)
    num_blocks = sum(cdiv(size, constants["BLOCK_N"]) for size in slice_sizes)
    expand_kernel[segments.chunk_start.numel(), num_blocks](
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
        v.stride(0),
        v.stride(1),
        v.stride(2),
        y.stride(0),
        **constants,
    )


def expand_constants(
    parts: int, slice_sizes: Sequence[int], chunk_size: int, sizes: BlockSizes, code_bits: int = 0
) -> dict[str, Any]:
    """The constants and options of the kernel. code_bits: of adapters that are codes, else 0."""
    return sizes | {
        "NUM_PARTS": parts,
        "SLICE_SIZES": tuple(slice_sizes),
        "BLOCK_M": chunk_size,
        "CODE_BITS": code_bits,
    }


# As in `shrink_kernel`.
@triton.jit(do_not_specialize=["first_slice"])
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
    stride_vp,
    stride_vs,
    stride_vm,
    stride_ym,
    NUM_PARTS: tl.constexpr,
    SLICE_SIZES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """One program: a chunk's tokens, BLOCK_N outputs of one slice, all ranks."""
    chunk = tl.program_id(0)
    # As in `shrink_kernel`: all that can be loaded at once is.
    length = tl.load(chunk_length_ptr + chunk)
    start = tl.load(chunk_start_ptr + chunk)
    lora_index = tl.load(chunk_lora_index_ptr + chunk)
    if length == 0:
        return
    slice_index, slice_start, slice_size, first_output = locate(tl.program_id(1), SLICE_SIZES, BLOCK_N)
    column = lora_index.to(tl.int64) * num_columns + first_slice + slice_index
    rank = tl.load(rank_ptr + column)
    # Of prompts there is no room for all beside the product.
    is_early: tl.constexpr = BLOCK_M <= _DECODE_CHUNK
    if is_early:
        offset = tl.load(b_offset_ptr + column)
        magnitude_offset = tl.load(magnitude_offset_ptr + column)
    rows = tl.arange(0, BLOCK_M)
    row_mask = (rows < length)[:, None]
    tokens = tl.load(permutation_ptr + start + rows, mask=rows < length, other=0).to(tl.int64)[:, None]
    if rank == 0:
        return

    v_rows = v_ptr + slice_index * stride_vs + tokens * stride_vm
    outputs = first_output + tl.arange(0, BLOCK_N)
    if is_early:
        y_tile, mask, total = _load_y(y_ptr + slice_start, tokens, stride_ym, row_mask, outputs, slice_size)
    else:
        offset = tl.load(b_offset_ptr + column)
    # With rank and place known to be multiples of eight, the loads are of 16 bytes. `tl.multiple_of` would mark the two
    # where they are loaded, and so for the other branch too; a product is a number of its own.
    if (rank % 8 == 0) & (offset % 8 == 0):
        update = _multiply(
            v_rows, arena_ptr + offset // 8 * 8, rank // 8 * 8, row_mask, outputs, slice_size,
            stride_vp, NUM_PARTS, BLOCK_M, BLOCK_N, BLOCK_R, CODE_BITS,
        )  # fmt: skip
    else:
        update = _multiply(
            v_rows, arena_ptr + offset, rank, row_mask, outputs, slice_size,
            stride_vp, NUM_PARTS, BLOCK_M, BLOCK_N, BLOCK_R, CODE_BITS,
        )  # fmt: skip

    if not is_early:
        magnitude_offset = tl.load(magnitude_offset_ptr + column)
        y_tile, mask, total = _load_y(y_ptr + slice_start, tokens, stride_ym, row_mask, outputs, slice_size)
    total += update
    if magnitude_offset >= 0:
        magnitude = load_magnitude(arena_ptr, magnitude_offset, outputs, outputs < slice_size, CODE_BITS)
        total *= magnitude[None, :]
    tl.store(y_tile, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_y(y_ptr, tokens, stride_ym, row_mask, outputs, slice_size):
    """The places of a tile of y, their mask, and the tile as float32."""
    mask = row_mask & (outputs < slice_size)[None, :]
    y_tile = y_ptr + tokens * stride_ym + outputs[None, :]
    return y_tile, mask, tl.load(y_tile, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _multiply(
    v_rows,
    b_ptr,
    rank,
    row_mask,
    outputs,
    slice_size,
    stride_vp,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """(sum over the parts of v) @ B^T: [BLOCK_M, BLOCK_N] float32."""
    update = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        ranks = first_rank + tl.arange(0, BLOCK_R)
        b = load_b(b_ptr, ranks, outputs, rank, slice_size, CODE_BITS)
        v_mask = row_mask & (ranks < rank)[None, :]
        v = tl.load(v_rows + ranks[None, :], mask=v_mask, other=0.0)
        for part in range(1, NUM_PARTS):
            v += tl.load(v_rows + part * stride_vp + ranks[None, :], mask=v_mask, other=0.0)
        update = exact_dot(v, b, update)
    if CODE_BITS == 8:
        update *= load_panel_scales(b_ptr, outputs, rank, outputs < slice_size)[None, :]
    return update


@triton.jit
def load_b(b_ptr, ranks, outputs, rank, slice_size, CODE_BITS: tl.constexpr):
    """A tile of B, [ranks, outputs], zero where the adapter or the slice has none; without the scales of 8 bits."""
    mask = (ranks < rank)[:, None] & (outputs < slice_size)[None, :]
    if CODE_BITS == 0:
        b = tl.load(b_ptr + outputs.to(tl.int64)[None, :] * rank + ranks[:, None], mask=mask, other=0.0)
    elif CODE_BITS == 8:
        b = tl.load(panel_codes(b_ptr, ranks[:, None], outputs[None, :], rank), mask=mask, other=0)
    else:
        b = load_int4(b_ptr, outputs[None, :] // 16, ranks[:, None], outputs[None, :] % 16, rank, mask, True)
    return b
