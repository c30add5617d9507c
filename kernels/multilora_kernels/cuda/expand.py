"""`lora_expand` and `lora_expand_activated` on a GPU, in OpenAI Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.adapter_codes import CODE_BITS
from multilora_kernels.cuda.block_sizes import MIN_BLOCK_R, BlockSizes, block_sizes, capability
from multilora_kernels.cuda.codes import arena_of_kernels, load_int4, load_magnitude, load_panel_scales, panel_codes
from multilora_kernels.cuda.elementwise import activation_of, gelu_tanh_mul, silu_mul
from multilora_kernels.cuda.expand_rows import expand_rows, locate
from multilora_kernels.cuda.integers import cdiv
from multilora_kernels.cuda.tiles import exact_dot
from multilora_kernels.segments import ROWS, LoRASegments
from multilora_kernels.tables import LoRATables

_PRODUCTS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
"""By the names of activations."""

_PROGRAMS = 512
"""About so many programs fill a GPU once."""

_MOST_BLOCKS = 8
"""Of outputs, that a program takes one after another. Its adapter, its rows and their v are looked up once for all."""

_MOST_PAIRS = 5
"""The same of blocks of gate and of up. Fewer would leave more programs of chunks that a step lacks."""


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
    expand = expand_rows if segments.chunk_size == ROWS else _expand_tiles
    expand(v, y, tables, first_slice, slice_sizes, segments, sizes)


def lora_expand_activated(
    v: torch.Tensor,
    gate_up: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    size: int,
    segments: LoRASegments,
    activation: str,
) -> torch.Tensor:
    """See `multilora_kernels.expand.lora_expand_activated`."""
    slice_sizes = (size, size)
    if segments.chunk_size != ROWS:
        constants = _tile_constants(v, gate_up, tables, slice_sizes, segments, None, activation)
        if constants["BLOCK_R"] > MIN_BLOCK_R:
            # The v of gate and of up would not stay within the registers.
            lora_expand(v, gate_up, tables, first_slice, slice_sizes, segments)
            return _PRODUCTS[activation](gate_up)
    out = gate_up.new_empty(len(gate_up), size)
    expand = expand_rows if segments.chunk_size == ROWS else _expand_tiles
    expand(v, gate_up, tables, first_slice, slice_sizes, segments, activation=activation, out=out)
    return out


def _expand_tiles(
    v: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
    sizes: BlockSizes | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """`lora_expand` of chunks; arguments as of `expand_rows`."""
    assert y.stride(1) == 1
    constants = _tile_constants(v, y, tables, slice_sizes, segments, sizes, activation)
    blocks, num_programs = expand_programs(constants, len(y))
    num_chunks = segments.chunk_start.numel()
    # Tokens of the base model are activated, too. As chunks they take what adapters leave, and at most one more.
    expand_kernel[num_chunks + (activation is not None), num_programs](
        v,
        y,
        out,
        arena_of_kernels(tables.arena),
        tables.rank,
        tables.b_offset,
        tables.magnitude_offset,
        segments.permutation,
        segments.chunk_start,
        segments.chunk_length,
        segments.chunk_lora_index,
        tables.rank.shape[1],
        num_chunks,
        len(y),
        first_slice,
        blocks,
        v.stride(0),
        v.stride(1),
        v.stride(2),
        y.stride(0),
        **constants,
    )


def _tile_constants(
    v: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
    sizes: BlockSizes | None,
    activation: str | None,
) -> dict[str, Any]:
    shape = (segments.chunk_size, tables.max_rank, capability(y.device), sum(slice_sizes), len(y))
    sizes = sizes or block_sizes("expand", *shape)
    code_bits = CODE_BITS.get(tables.arena.dtype, 0)
    is_wide = is_wide_tile(y.dtype, tables.arena.dtype)
    return expand_constants(
        v.shape[0], slice_sizes, segments.chunk_size, tables.max_rank, is_wide, sizes, code_bits, activation
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
    activation: str | None = None,
) -> dict[str, Any]:
    """The constants and options of the kernel. is_wide: as `is_wide_tile`. code_bits: as of `shrink_constants`.

    activation: as of `expand_rows_constants`.
    """
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
        "ACTIVATION": activation,
    }


def expand_programs(constants: dict[str, Any], num_tokens: int) -> tuple[int, int]:
    """How many blocks of outputs a program takes one after another, and the programs of a chunk.

    So many blocks as leave programs that fill a GPU. The number of tokens decides, never their adapters.
    """
    slice_sizes, block, is_activated = constants["SLICE_SIZES"], constants["BLOCK_N"], bool(constants["ACTIVATION"])
    slice_sizes = slice_sizes[:1] if is_activated else slice_sizes
    num_blocks = sum(cdiv(size, block) for size in slice_sizes)
    most = _MOST_PAIRS if is_activated else _MOST_BLOCKS
    blocks = max(1, min(most, cdiv(num_tokens, constants["BLOCK_M"]) * num_blocks // _PROGRAMS))
    return blocks, sum(cdiv(size, blocks * block) for size in slice_sizes)


# As in `shrink_kernel`.
@triton.jit(do_not_specialize=["num_chunks", "num_tokens", "first_slice", "blocks"])
def expand_kernel(
    v_ptr,
    y_ptr,
    out_ptr,
    arena_ptr,
    rank_ptr,
    b_offset_ptr,
    magnitude_offset_ptr,
    permutation_ptr,
    chunk_start_ptr,
    chunk_length_ptr,
    chunk_lora_index_ptr,
    num_columns,
    num_chunks,
    num_tokens,
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
    ACTIVATION: tl.constexpr,
):
    """One program: a chunk's tokens, `blocks` times BLOCK_N outputs of one slice, all ranks; with an activation, the
    same of gate and of up.
    """
    chunk = tl.program_id(0)
    # As in `shrink_kernel`: all that can be loaded at once is.
    is_chunk = True if ACTIVATION is None else chunk < num_chunks
    length = tl.load(chunk_length_ptr + chunk, mask=is_chunk, other=0)
    start = tl.load(chunk_start_ptr + chunk, mask=is_chunk, other=0)
    lora_index = tl.load(chunk_lora_index_ptr + chunk, mask=is_chunk, other=-1)
    if ACTIVATION is not None:  # noqa: SIM102 - the compiler chooses by the first alone
        if length == 0:
            start, length = _of_base_model(chunk, chunk_length_ptr, num_chunks, num_tokens, BLOCK_M)
    if length == 0:
        return
    span = blocks * BLOCK_N
    column = lora_index.to(tl.int64) * num_columns + first_slice
    rows = tl.arange(0, BLOCK_M)
    row_mask = (rows < length)[:, None]
    # With rank and place known to be multiples of eight, the loads are of 16 bytes. `tl.multiple_of` would mark the two
    # where they are loaded, and so for the other branch too; a product is a number of its own.
    if ACTIVATION is None:
        slice_index, slice_start, slice_size, first_output = locate(tl.program_id(1), SLICE_SIZES, span)
        rank = tl.load(rank_ptr + column + slice_index)
        offset = tl.load(b_offset_ptr + column + slice_index)
        magnitude_offset = tl.load(magnitude_offset_ptr + column + slice_index)
        tokens = tl.load(permutation_ptr + start + rows, mask=rows < length, other=0).to(tl.int64)[:, None]
        if rank == 0:
            return
        v_rows = v_ptr + slice_index * stride_vs + tokens * stride_vm
        y_rows = y_ptr + slice_start + tokens * stride_ym
        end = tl.minimum(first_output + span, slice_size)
        if (rank % 8 == 0) & (offset % 8 == 0):
            _add_update(
                y_rows, v_rows, arena_ptr, offset // 8 * 8, magnitude_offset, rank // 8 * 8, row_mask, first_output,
                end, stride_vp, NUM_PARTS, BLOCK_M, BLOCK_N, BLOCK_R, HAS_MORE_RANKS, CODE_BITS,
            )  # fmt: skip
        else:
            _add_update(
                y_rows, v_rows, arena_ptr, offset, magnitude_offset, rank, row_mask, first_output,
                end, stride_vp, NUM_PARTS, BLOCK_M, BLOCK_N, BLOCK_R, HAS_MORE_RANKS, CODE_BITS,
            )  # fmt: skip
    else:
        size: tl.constexpr = SLICE_SIZES[0]
        has_adapter = lora_index >= 0
        rank = tl.load(rank_ptr + column, mask=has_adapter, other=0)
        up_rank = tl.load(rank_ptr + column + 1, mask=has_adapter, other=0)
        offset = tl.load(b_offset_ptr + column, mask=has_adapter, other=0)
        up_offset = tl.load(b_offset_ptr + column + 1, mask=has_adapter, other=0)
        magnitude_offset = tl.load(magnitude_offset_ptr + column, mask=has_adapter, other=-1)
        up_magnitude_offset = tl.load(magnitude_offset_ptr + column + 1, mask=has_adapter, other=-1)
        tokens = tl.load(permutation_ptr + start + rows, mask=rows < length, other=0).to(tl.int64)[:, None]
        v_rows = v_ptr + tokens * stride_vm
        y_rows = y_ptr + tokens * stride_ym
        out_rows = out_ptr + tokens * size
        first_output = tl.program_id(1) * span
        end = tl.minimum(first_output + span, size)
        # What an adapter lacks lies nowhere.
        is_aligned = (rank % 8 == 0) & (up_rank % 8 == 0)
        is_aligned &= ((offset % 8 == 0) | (rank == 0)) & ((up_offset % 8 == 0) | (up_rank == 0))
        if is_aligned:
            _activate(
                out_rows, y_rows, v_rows, arena_ptr, offset // 8 * 8, up_offset // 8 * 8, magnitude_offset,
                up_magnitude_offset, rank // 8 * 8, up_rank // 8 * 8, row_mask, first_output, end, stride_vp, stride_vs,
                size, NUM_PARTS, BLOCK_M, BLOCK_N, BLOCK_R, HAS_MORE_RANKS, CODE_BITS, ACTIVATION,
            )  # fmt: skip
        else:
            _activate(
                out_rows, y_rows, v_rows, arena_ptr, offset, up_offset, magnitude_offset,
                up_magnitude_offset, rank, up_rank, row_mask, first_output, end, stride_vp, stride_vs,
                size, NUM_PARTS, BLOCK_M, BLOCK_N, BLOCK_R, HAS_MORE_RANKS, CODE_BITS, ACTIVATION,
            )  # fmt: skip


@triton.jit
def _of_base_model(chunk, chunk_length_ptr, num_chunks, num_tokens, BLOCK_M: tl.constexpr):
    """Start and length of what a chunk without an adapter has of the base model's tokens, the last of the permutation:
    BLOCK_M for each of the first such chunks.
    """
    places = tl.arange(0, 128)
    num_used = 0
    first = 0
    for place in range(0, num_chunks, 128):
        lengths = tl.load(chunk_length_ptr + place + places, mask=place + places < num_chunks, other=0)
        num_used += tl.sum((lengths > 0).to(tl.int32), 0)
        first += tl.sum(lengths, 0)
    start = first + (chunk - num_used) * BLOCK_M
    return start, tl.minimum(tl.maximum(num_tokens - start, 0), BLOCK_M)


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
    ranks = tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_N)
    y = tl.load(y_rows + (first_output + columns)[None, :], row_mask & (first_output + columns < end)[None, :], 0.0)
    v = _load_v(v_rows, ranks, rank, row_mask, stride_vp, NUM_PARTS, 1 if HAS_MORE_RANKS else 4)
    for first in range(first_output, end, BLOCK_N):
        outputs = first + columns
        following = outputs + BLOCK_N
        next_y = tl.load(y_rows + following[None, :], mask=row_mask & (following < end)[None, :], other=0.0)
        total = _updated(
            y, v, v_rows, arena_ptr, offset, magnitude_offset, rank, row_mask, outputs, end,
            stride_vp, NUM_PARTS, BLOCK_M, BLOCK_N, BLOCK_R, HAS_MORE_RANKS, CODE_BITS,
        )  # fmt: skip
        y_tile = y_rows + outputs[None, :]
        tl.store(y_tile, total.to(y.dtype), mask=row_mask & (outputs < end)[None, :])
        y = next_y


@triton.jit
def _activate(
    out_rows,
    y_rows,
    v_rows,
    arena_ptr,
    offset,
    up_offset,
    magnitude_offset,
    up_magnitude_offset,
    rank,
    up_rank,
    row_mask,
    first_output,
    end,
    stride_vp,
    stride_vs,
    size: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_MORE_RANKS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """As `_add_update`, of gate and of up, and write their activation."""
    ranks = tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_N)
    AT_ONCE: tl.constexpr = 1 if HAS_MORE_RANKS else 4
    y = tl.load(y_rows + (first_output + columns)[None, :], row_mask & (first_output + columns < end)[None, :], 0.0)
    gate_v = _load_v(v_rows, ranks, rank, row_mask, stride_vp, NUM_PARTS, AT_ONCE)
    up_v = _load_v(v_rows + stride_vs, ranks, up_rank, row_mask, stride_vp, NUM_PARTS, AT_ONCE)
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=y.dtype)
    # In one loop, as in `expand_rows_kernel`.
    for step in tl.range(0, tl.cdiv(end - first_output, BLOCK_N) * 2, disable_licm=True):
        is_up = step % 2 == 1
        outputs = first_output + step // 2 * BLOCK_N + columns
        following = first_output + (step + 1) // 2 * BLOCK_N + columns
        next_rows = y_rows + tl.where(is_up, 0, size)
        next_y = tl.load(next_rows + following[None, :], mask=row_mask & (following < end)[None, :], other=0.0)
        step_rank = tl.where(is_up, up_rank, rank)
        total = y.to(tl.float32)
        if step_rank > 0:
            total = _updated(
                y, tl.where(is_up, up_v, gate_v), v_rows + tl.where(is_up, stride_vs, 0), arena_ptr,
                tl.where(is_up, up_offset, offset), tl.where(is_up, up_magnitude_offset, magnitude_offset),
                step_rank, row_mask, outputs, end,
                stride_vp, NUM_PARTS, BLOCK_M, BLOCK_N, BLOCK_R, HAS_MORE_RANKS, CODE_BITS,
            )  # fmt: skip
        # Rounded, as if it were stored and loaded again.
        rounded = total.to(y.dtype)
        if is_up:
            product = activation_of(gate.to(tl.float32), ACTIVATION) * rounded.to(tl.float32)
            tl.store(out_rows + outputs[None, :], product.to(y.dtype), mask=row_mask & (outputs < end)[None, :])
        gate = rounded
        y = next_y


@triton.jit
def _updated(
    y,
    v,
    v_rows,
    arena_ptr,
    offset,
    magnitude_offset,
    rank,
    row_mask,
    outputs,
    end,
    stride_vp,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_MORE_RANKS: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """(y + v B^T) * magnitude of a block of outputs, float32. v: its first ranks."""
    b_ptr = arena_ptr + offset
    ranks = tl.arange(0, BLOCK_R)
    b = load_b(b_ptr, ranks, outputs, rank, end, CODE_BITS)
    update = exact_dot(v, b, tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
    if HAS_MORE_RANKS:
        for first_rank in range(BLOCK_R, rank, BLOCK_R):
            b = load_b(b_ptr, first_rank + ranks, outputs, rank, end, CODE_BITS)
            more_v = _load_v(v_rows, first_rank + ranks, rank, row_mask, stride_vp, NUM_PARTS, 1)
            update = exact_dot(more_v, b, update)
    if CODE_BITS == 8:
        update *= load_panel_scales(b_ptr, outputs, rank, outputs < end)[None, :]
    total = y.to(tl.float32) + update
    if magnitude_offset >= 0:
        total *= load_magnitude(arena_ptr, magnitude_offset, outputs, outputs < end, CODE_BITS)[None, :]
    return total


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
