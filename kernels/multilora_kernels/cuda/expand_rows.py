"""`lora_expand` and `lora_expand_activated` of steps without prompts on a GPU, in OpenAI Triton: as `shrink_rows`, each
row by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from multilora_kernels.adapter_codes import CODE_BITS
from multilora_kernels.cuda.block_sizes import BlockSizes, block_sizes, capability
from multilora_kernels.cuda.code_values import int4_values
from multilora_kernels.cuda.codes import (
    arena_of_kernels,
    code_values,
    load_int4,
    load_magnitude,
    load_panel_scales,
    load_two_of_int4,
    panel_codes,
)
from multilora_kernels.cuda.dependent_launch import launches_dependently
from multilora_kernels.cuda.elementwise import activation_of
from multilora_kernels.cuda.integers import cdiv, next_power_of_2
from multilora_kernels.segments import LoRASegments
from multilora_kernels.tables import LoRATables


def expand_rows(
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
    """`lora_expand` of segments that are rows. sizes: to try others than the table's.

    With an activation the slices are gate and up, `out` gets the activations, and y stays as it is.
    """
    assert y.stride(1) == 1
    shape = (segments.chunk_size, tables.max_rank, capability(y.device), sum(slice_sizes), len(y))
    code_bits = CODE_BITS.get(tables.arena.dtype, 0)
    is_wide = tables.arena.dtype == torch.float32
    sizes = sizes or block_sizes("expand", *shape)
    constants = expand_rows_constants(v.shape[0], slice_sizes, is_wide, sizes, code_bits, activation)
    # Rows that share an adapter read one place of it side by side.
    expand_rows_kernel[len(y), expand_rows_blocks(constants)](
        v,
        y,
        out,
        arena_of_kernels(tables.arena),
        tables.rank,
        tables.b_offset,
        tables.magnitude_offset,
        segments.chunk_lora_index,
        tables.rank.shape[1],
        first_slice,
        v.stride(0),
        v.stride(1),
        v.stride(2),
        y.stride(0),
        **constants,
        LAUNCHES_DEPENDENTS=launches_dependently(y.device),
    )


def expand_rows_constants(
    parts: int,
    slice_sizes: Sequence[int],
    is_wide: bool,
    sizes: BlockSizes,
    code_bits: int = 0,
    activation: str | None = None,
) -> dict[str, Any]:
    """The constants and options of the kernel. activation: as of `activation_constants`, or None. The rest as of
    `shrink_rows_constants`.
    """
    return sizes | {
        "NUM_PARTS": parts,
        "BLOCK_P": next_power_of_2(parts),
        "SLICE_SIZES": tuple(slice_sizes),
        "BLOCK_N": sizes["BLOCK_N"] // (2 if is_wide else 1),
        "CODE_BITS": code_bits,
        "ACTIVATION": activation,
    }


def expand_rows_blocks(constants: dict[str, Any]) -> int:
    """The programs of a row."""
    slice_sizes, block = constants["SLICE_SIZES"], constants["BLOCK_N"]
    return sum(cdiv(size, block) for size in (slice_sizes[:1] if constants["ACTIVATION"] else slice_sizes))


# As in `shrink_kernel`.
@triton.jit(do_not_specialize=["first_slice"])
def expand_rows_kernel(
    v_ptr,
    y_ptr,
    out_ptr,
    arena_ptr,
    rank_ptr,
    b_offset_ptr,
    magnitude_offset_ptr,
    mapping_ptr,
    num_columns,
    first_slice,
    stride_vp,
    stride_vs,
    stride_vm,
    stride_ym,
    NUM_PARTS: tl.constexpr,
    SLICE_SIZES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CODE_BITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LAUNCHES_DEPENDENTS: tl.constexpr,
):
    """One program: a row, BLOCK_N outputs of one slice, all ranks; with an activation, the same of gate and of up."""
    if LAUNCHES_DEPENDENTS:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    lora_index = tl.load(mapping_ptr + row)
    column = lora_index.to(tl.int64) * num_columns + first_slice
    y_row = y_ptr + row * stride_ym
    v_row = v_ptr + row * stride_vm
    if ACTIVATION is None:
        if lora_index < 0:
            return
        slice_index, slice_start, slice_size, first_output = locate(tl.program_id(1), SLICE_SIZES, BLOCK_N)
        # All at once: loads one after another would take as long as the work.
        rank = tl.load(rank_ptr + column + slice_index)
        offset = tl.load(b_offset_ptr + column + slice_index)
        magnitude_offset = tl.load(magnitude_offset_ptr + column + slice_index)
        outputs = first_output + tl.arange(0, BLOCK_N)
        mask = outputs < slice_size
        places = y_row + slice_start + outputs
        total = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        if rank == 0:
            return
        total = _updated(
            total, v_row + slice_index * stride_vs, arena_ptr, rank, offset, magnitude_offset, first_output, slice_size,
            stride_vp, NUM_PARTS, BLOCK_P, BLOCK_N, BLOCK_R, CODE_BITS,
        )  # fmt: skip
        tl.store(places, total.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        size: tl.constexpr = SLICE_SIZES[0]
        first_output = tl.program_id(1) * BLOCK_N
        outputs = first_output + tl.arange(0, BLOCK_N)
        mask = outputs < size
        up = tl.zeros((BLOCK_N,), dtype=y_ptr.dtype.element_ty)
        gate = up
        # In one loop: with code for each, or numbers kept from one for the other, a thread takes more registers.
        for slice_index in tl.range(0, 2, disable_licm=True):
            gate = up
            rank = tl.load(rank_ptr + column + slice_index, mask=lora_index >= 0, other=0)
            offset = tl.load(b_offset_ptr + column + slice_index, mask=lora_index >= 0, other=0)
            magnitude_offset = tl.load(magnitude_offset_ptr + column + slice_index, mask=lora_index >= 0, other=-1)
            total = tl.load(y_row + slice_index * size + outputs, mask=mask, other=0.0).to(tl.float32)
            if rank > 0:
                total = _updated(
                    total, v_row + slice_index * stride_vs, arena_ptr, rank, offset, magnitude_offset, first_output,
                    size, stride_vp, NUM_PARTS, BLOCK_P, BLOCK_N, BLOCK_R, CODE_BITS,
                )  # fmt: skip
            # Rounded, as if it were stored and loaded again.
            up = total.to(y_ptr.dtype.element_ty)
        product = activation_of(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)
        tl.store(out_ptr + row * size + outputs, product.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _updated(
    total,
    v_row,
    arena_ptr,
    rank,
    offset,
    magnitude_offset,
    first_output,
    slice_size,
    stride_vp,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """(total + B @ (sum over the parts of v)) * magnitude, for BLOCK_N outputs of a slice: float32."""
    outputs = first_output + tl.arange(0, BLOCK_N)
    # As in `expand_kernel`: with rank and place known to be multiples of so many, the loads are of 16 bytes.
    UNIT: tl.constexpr = 8 if CODE_BITS == 0 else 16
    if (rank % UNIT == 0) & (offset % UNIT == 0):
        if CODE_BITS == 4:
            total += _multiply_int4(
                v_row, arena_ptr + offset // 16 * 16, rank // 16 * 16, first_output, slice_size,
                stride_vp, NUM_PARTS, BLOCK_P, BLOCK_N,
            )  # fmt: skip
        else:
            total += _multiply(
                v_row, arena_ptr + offset // UNIT * UNIT, rank // UNIT * UNIT, outputs, slice_size,
                stride_vp, NUM_PARTS, BLOCK_P, BLOCK_N, BLOCK_R, CODE_BITS,
            )  # fmt: skip
    else:
        # Fewer at a time: each load is of one number, and has an address of its own.
        total += _multiply(
            v_row, arena_ptr + offset, rank, outputs, slice_size,
            stride_vp, NUM_PARTS, BLOCK_P, BLOCK_N, BLOCK_R if BLOCK_R < 4 else 4, CODE_BITS,
        )  # fmt: skip
    if magnitude_offset >= 0:
        total *= load_magnitude(arena_ptr, magnitude_offset, outputs, outputs < slice_size, CODE_BITS)
    return total


@triton.jit
def locate(block, SLICE_SIZES: tl.constexpr, BLOCK_N: tl.constexpr):
    """The slice of a block of outputs, where the slice starts, its size, and the block's first output in it."""
    slice_index = 0
    slice_start = 0
    slice_size = 0
    first_output = 0
    first_block = 0
    start = 0
    for s in tl.static_range(len(SLICE_SIZES)):
        if block >= first_block:
            slice_index = s
            slice_start = start
            slice_size = SLICE_SIZES[s]
            first_output = (block - first_block) * BLOCK_N
        first_block += (SLICE_SIZES[s] + BLOCK_N - 1) // BLOCK_N
        start += SLICE_SIZES[s]
    return slice_index, slice_start, slice_size, first_output


@triton.jit
def _multiply(
    v_row,
    b_ptr,
    rank,
    outputs,
    slice_size,
    stride_vp,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """B @ (sum over the parts of v): [BLOCK_N] float32."""
    update = tl.zeros((BLOCK_N,), dtype=tl.float32)
    parts = tl.arange(0, BLOCK_P)[:, None]
    for first_rank in range(0, rank, BLOCK_R):
        ranks = first_rank + tl.arange(0, BLOCK_R)
        # As a tile: all parts are asked for at once, by different threads. It comes first, so that the compiler
        # computes in the layout of B.
        v_mask = (parts < NUM_PARTS) & (ranks < rank)[None, :]
        v_parts = tl.load(v_row + parts * stride_vp + ranks[None, :], v_mask, other=0.0)
        mask = (outputs < slice_size)[:, None] & (ranks < rank)[None, :]
        if CODE_BITS == 4:
            b = load_int4(b_ptr, outputs[:, None] // 16, ranks[None, :], outputs[:, None] % 16, rank, mask, True)
        elif CODE_BITS == 8:
            b = code_values(tl.load(panel_codes(b_ptr, ranks[None, :], outputs[:, None], rank), mask, other=0))
        else:
            b = tl.load(b_ptr + outputs[:, None] * rank + ranks[None, :], mask, other=0.0)
        v = tl.sum(v_parts, 0)
        update += tl.sum(b.to(tl.float32) * v[None, :], 1)
    if CODE_BITS == 8:
        update *= load_panel_scales(b_ptr, outputs, rank, outputs < slice_size)
    return update


@triton.jit
def _multiply_int4(
    v_row,
    b_ptr,
    rank,
    first_output,
    slice_size,
    stride_vp,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As `_multiply`, for whole blocks of codes of 4 bits: a row of a tile is two outputs, see `load_two_of_int4`."""
    update = tl.zeros((BLOCK_N // 2, 2), dtype=tl.float32)
    halves = first_output // 2 + tl.arange(0, BLOCK_N // 2)
    parts = tl.arange(0, BLOCK_P)[:, None]
    even = tl.arange(0, 16) % 8 * 2
    for first_rank in range(0, rank, 16):
        places = v_row + parts * stride_vp + first_rank + even[None, :]
        v_even = tl.load(places, mask=parts < NUM_PARTS, other=0.0)
        v_odd = tl.load(places + 1, mask=parts < NUM_PARTS, other=0.0)
        codes, scales = load_two_of_int4(b_ptr, halves, first_rank, rank, halves * 2 < slice_size)
        lower, upper = int4_values(codes, tl.bfloat16)
        products = lower.to(tl.float32) * tl.sum(v_even, 0)[None, :] + upper.to(tl.float32) * tl.sum(v_odd, 0)[None, :]
        update += tl.sum(tl.reshape(products, (BLOCK_N // 2, 2, 8)), 2) * scales
    return tl.reshape(update, (BLOCK_N,))
