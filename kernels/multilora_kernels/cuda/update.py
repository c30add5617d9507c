"""`lora_apply` of decode batches on a GPU, in OpenAI Triton: shrink and expand of a fused linear in one launch.

A program computes v = x A^T of its chunk and slice itself, keeps it in registers, and adds v B^T to some thousand
outputs. The programs of one slice repeat that first half, but read A from the cache, since they run side by side; what
they save is a launch, and the way of v through memory.

On an H200 that took longer than two launches in all shapes tried (docs/gpu.md), so the table has two; the tuners try
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.adapter_codes import CODE_BITS
from multilora_kernels.cuda.block_sizes import BlockSizes, block_sizes, capability, takes_two_launches
from multilora_kernels.cuda.codes import arena_of_kernels, header_bytes, load_magnitude, load_panel_scales
from multilora_kernels.cuda.expand import load_b, locate, lora_expand
from multilora_kernels.cuda.integers import cdiv, next_power_of_2
from multilora_kernels.cuda.shrink import lora_shrink, sum_parts
from multilora_kernels.cuda.tiles import exact_dot
from multilora_kernels.parts import PART_SIZE
from multilora_kernels.segments import CHUNK_SIZE, LoRASegments
from multilora_kernels.tables import LoRATables

_MAX_RANK = 64
"""Ranks whose v fits registers beside the tiles."""

_MAX_A_ELEMENTS = 1 << 20
"""Of an A that one program reads alone: a larger one takes it longer than two launches."""

_FEW_RANKS = tl.constexpr(16)
_MIN_OUTPUTS, _MAX_OUTPUTS = 2048, 8192
_PROGRAMS = 4
"""About so many programs of a chunk: fewer leave a GPU idle where few adapters decode, more read A more often."""


def lora_apply(
    x: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
) -> None:
    """See `multilora_kernels.apply.lora_apply`."""
    gpu = capability(x.device)
    is_one = is_one_launch(x.shape[1], tables.max_rank, segments.chunk_size)
    if is_one and not takes_two_launches(tables.max_rank, gpu, x.shape[1]):
        lora_update(x, y, tables, first_slice, slice_sizes, segments)
    else:
        v = lora_shrink(x, tables, first_slice, len(slice_sizes), segments)
        lora_expand(v, y, tables, first_slice, slice_sizes, segments)


def is_one_launch(in_features: int, max_rank: int, chunk_size: int) -> bool:
    """Whether `lora_update` can serve such a linear; it depends on nothing that a captured graph does not know."""
    is_small = max_rank <= _MAX_RANK and max_rank * in_features <= _MAX_A_ELEMENTS
    return chunk_size <= CHUNK_SIZE and is_small


def lora_update(
    x: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
    sizes: BlockSizes | None = None,
) -> None:
    """`lora_apply` in one launch, of ranks up to 64. sizes: to try others than the table's."""
    in_features = x.shape[1]
    assert x.stride(1) == y.stride(1) == 1
    is_wide = torch.float32 in (x.dtype, tables.arena.dtype)
    shape = (segments.chunk_size, tables.max_rank, capability(x.device), in_features, len(x))
    sizes = sizes or block_sizes("update", *shape)
    constants = update_constants(
        in_features, slice_sizes, segments.chunk_size, is_wide, sizes, CODE_BITS.get(tables.arena.dtype, 0)
    )
    assert tables.max_rank <= constants["BLOCK_R"], "one tile has all ranks"
    num_blocks = sum(cdiv(size, constants["OUTPUTS"]) for size in slice_sizes)
    # The programs of a chunk are neighbours: the second finds in the cache the A that the first has read.
    update_kernel[num_blocks, segments.chunk_start.numel()](
        x,
        y,
        arena_of_kernels(tables.arena),
        tables.rank,
        tables.a_offset,
        tables.b_offset,
        tables.magnitude_offset,
        segments.permutation,
        segments.chunk_start,
        segments.chunk_length,
        segments.chunk_lora_index,
        in_features,
        tables.rank.shape[1],
        first_slice,
        x.stride(0),
        y.stride(0),
        **constants,
    )


def update_constants(
    in_features: int,
    slice_sizes: Sequence[int],
    chunk_size: int,
    is_wide: bool,
    sizes: BlockSizes,
    code_bits: int = 0,
) -> dict[str, Any]:
    """The constants and options of the kernel; arguments as of `shrink_constants`."""
    outputs = next_power_of_2(cdiv(sum(slice_sizes), _PROGRAMS))
    is_narrow = is_wide or code_bits == 4
    return sizes | {
        "SLICE_SIZES": tuple(slice_sizes),
        "OUTPUTS": min(_MAX_OUTPUTS, max(_MIN_OUTPUTS, outputs)),
        "NUM_PARTS": cdiv(in_features, PART_SIZE),
        "PART_SIZE": PART_SIZE,
        "BLOCK_M": chunk_size,
        "BLOCK_K": sizes["BLOCK_K"] // (4 if is_narrow else 1),
        "BLOCK_N": sizes["BLOCK_N"] // (2 if is_narrow else 1),
        "CODE_BITS": code_bits,
    }


# As in `shrink_kernel`.
@triton.jit(do_not_specialize=["first_slice"])
def update_kernel(
    x_ptr,
    y_ptr,
    arena_ptr,
    rank_ptr,
    a_offset_ptr,
    b_offset_ptr,
    magnitude_offset_ptr,
    permutation_ptr,
    chunk_start_ptr,
    chunk_length_ptr,
    chunk_lora_index_ptr,
    in_features,
    num_columns,
    first_slice,
    stride_xm,
    stride_ym,
    SLICE_SIZES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """One program: a chunk's tokens, OUTPUTS outputs of one slice, all ranks."""
    chunk = tl.program_id(1)
    # All at once, before anything is decided: three loads one after another would take as long as the work.
    length = tl.load(chunk_length_ptr + chunk)
    start = tl.load(chunk_start_ptr + chunk)
    lora_index = tl.load(chunk_lora_index_ptr + chunk)
    if length == 0:
        return
    slice_index, slice_start, slice_size, first_output = locate(tl.program_id(0), SLICE_SIZES, OUTPUTS)
    column = lora_index.to(tl.int64) * num_columns + first_slice + slice_index
    rank = tl.load(rank_ptr + column)
    a_offset = tl.load(a_offset_ptr + column)
    b_offset = tl.load(b_offset_ptr + column)
    magnitude_offset = tl.load(magnitude_offset_ptr + column)
    rows = tl.arange(0, BLOCK_M)
    tokens = tl.load(permutation_ptr + start + rows, mask=rows < length, other=0)
    if rank == 0:
        return
    tokens = tokens.to(tl.int64)[:, None]
    x_rows = x_ptr + tokens * stride_xm
    y_rows = y_ptr + tokens * stride_ym + slice_start
    # As in `expand_kernel`: with places and rank known to be multiples of eight the loads are of 16 bytes.
    is_aligned = (rank % 8 == 0) & (a_offset % 16 == 0) & (b_offset % 8 == 0)
    if is_aligned & (rank <= _FEW_RANKS):
        _update(
            x_rows, y_rows, arena_ptr, a_offset // 16 * 16, b_offset // 8 * 8, magnitude_offset, rank // 8 * 8,
            length, in_features, slice_size, first_output, OUTPUTS,
            NUM_PARTS, PART_SIZE, BLOCK_M, 16, BLOCK_K, BLOCK_N, CODE_BITS,
        )  # fmt: skip
    elif is_aligned:
        _update(
            x_rows, y_rows, arena_ptr, a_offset // 16 * 16, b_offset // 8 * 8, magnitude_offset, rank // 8 * 8,
            length, in_features, slice_size, first_output, OUTPUTS,
            NUM_PARTS, PART_SIZE, BLOCK_M, BLOCK_R, BLOCK_K // 2, BLOCK_N, CODE_BITS,
        )  # fmt: skip
    else:
        _update(
            x_rows, y_rows, arena_ptr, a_offset, b_offset, magnitude_offset, rank,
            length, in_features, slice_size, first_output, OUTPUTS,
            NUM_PARTS, PART_SIZE, BLOCK_M, BLOCK_R, BLOCK_K // 4, BLOCK_N, CODE_BITS,
        )  # fmt: skip


@triton.jit
def _update(
    x_rows,
    y_rows,
    arena_ptr,
    a_offset,
    b_offset,
    magnitude_offset,
    rank,
    length,
    in_features,
    slice_size,
    first_output,
    OUTPUTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """Add the update of a chunk to some outputs of a slice. BLOCK_R: not less than `rank`."""
    a_ptr = arena_ptr + a_offset
    if CODE_BITS == 8:
        a_ptr += header_bytes(rank)
    v = sum_parts(
        x_rows, a_ptr, rank, 0, length, 0, in_features, NUM_PARTS, PART_SIZE, BLOCK_M, BLOCK_R, BLOCK_K, CODE_BITS
    )
    ranks = tl.arange(0, BLOCK_R)
    if CODE_BITS == 8:
        scales_ptr = (arena_ptr + a_offset).to(tl.pointer_type(tl.float32))
        v *= tl.load(scales_ptr + ranks, mask=ranks < rank, other=0.0)[None, :]
    row_mask = (tl.arange(0, BLOCK_M) < length)[:, None]
    b_ptr = arena_ptr + b_offset
    for first in range(first_output, tl.minimum(first_output + OUTPUTS, slice_size), BLOCK_N):
        outputs = first + tl.arange(0, BLOCK_N)
        output_mask = outputs < slice_size
        b = load_b(b_ptr, ranks, outputs, rank, slice_size, CODE_BITS)
        update = exact_dot(v, b, tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
        if CODE_BITS == 8:
            update *= load_panel_scales(b_ptr, outputs, rank, output_mask)[None, :]
        mask = row_mask & output_mask[None, :]
        y_tile = y_rows + outputs[None, :]
        total = tl.load(y_tile, mask=mask, other=0.0).to(tl.float32) + update
        if magnitude_offset >= 0:
            magnitude = load_magnitude(arena_ptr, magnitude_offset, outputs, output_mask, CODE_BITS)
            total *= magnitude[None, :]
        tl.store(y_tile, total.to(y_rows.dtype.element_ty), mask=mask)
