"""Adapters that are stored as codes: loading tiles of A and B, and the order of B. See `adapter_codes`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels import adapter_codes
from multilora_kernels.cuda.code_values import int8_values
from multilora_kernels.cuda.integers import next_power_of_2

_LANES = tl.constexpr(adapter_codes.LANES)
_BLOCK_COLUMNS = tl.constexpr(adapter_codes.BLOCK_COLUMNS)
_SCALE_BYTES = tl.constexpr(adapter_codes.SCALE_BYTES)
_BLOCK_BYTES = tl.constexpr(adapter_codes.panel_bytes(adapter_codes.BLOCK_COLUMNS, 4))


def arena_of_kernels(arena: torch.Tensor) -> torch.Tensor:
    """The arena as kernels take it: codes of fp8 as bytes, since chips before sm_89 have no float8_e4m3fn."""
    return arena.view(torch.uint8) if arena.dtype == torch.float8_e4m3fn else arena


@triton.jit
def header_bytes(rank):
    """Bytes before the codes of 8 bits of an A."""
    return (4 * rank + 63) // 64 * 64


@triton.jit
def panel_bytes(columns, BITS: tl.constexpr):
    """Bytes of a panel."""
    if BITS == 8:
        size = _SCALE_BYTES + _LANES * columns
    else:
        rest = columns % _BLOCK_COLUMNS
        last = tl.where(rest > 0, _SCALE_BYTES + _LANES * ((rest + 1) // 2), 0)
        size = columns // _BLOCK_COLUMNS * _BLOCK_BYTES + last
    return size


@triton.jit
def load_panel_scales(b_ptr, outputs, rank, mask):
    """The scales of outputs of a B in codes of 8 bits, as float32."""
    panels = outputs.to(tl.int64) // _LANES * panel_bytes(rank, 8)
    return tl.load(_bfloat16_at(b_ptr + panels + outputs % _LANES * 2), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def panel_codes(b_ptr, columns, lanes, num_columns):
    """The places of the codes of 8 bits of columns of the panels of some lanes in a B, in the order of a GPU."""
    panels = lanes.to(tl.int64) // _LANES * panel_bytes(num_columns, 8)
    return b_ptr + panels + _SCALE_BYTES + lanes % _LANES * num_columns + columns


@triton.jit
def code_values(codes):
    """The values of codes of 8 bits without their scales, as float32: int8, or uint8 as the bytes of float8_e4m3fn."""
    if codes.dtype == tl.uint8:
        codes = int8_values(codes, tl.bfloat16)
    return codes.to(tl.float32)


@triton.jit
def load_int4(ptr, panels, columns, lanes, num_columns, mask, IS_B: tl.constexpr):
    """Values in 4-bit codes, as float32, in which they are exact. Arguments broadcast to the shape of the result.

    IS_B: of a B, in the order of a GPU.
    """
    starts = ptr + panels.to(tl.int64) * panel_bytes(num_columns, 4) + columns // _BLOCK_COLUMNS * _BLOCK_BYTES
    scales = tl.load(_bfloat16_at(starts + lanes * 2), mask=mask, other=0.0).to(tl.float32)
    column = columns % _BLOCK_COLUMNS
    if IS_B:
        of_block = tl.minimum(num_columns - columns // _BLOCK_COLUMNS * _BLOCK_COLUMNS, _BLOCK_COLUMNS)
        places = lanes * ((of_block + 1) // 2) + column // 2
    else:
        places = column // 2 * _LANES + lanes
    pairs = tl.load(starts + _SCALE_BYTES + places, mask=mask, other=0).to(tl.int32)
    codes = ((pairs >> (column % 2 * 4)) & 15 ^ 8) - 8
    return codes.to(tl.float32) * scales


@triton.jit
def load_two_of_int4(b_ptr, halves, first_rank, rank, mask):
    """Codes of a whole block of a B, whose ranks are multiples of sixteen: bytes [halves, 16], the scales of 2 outputs.

    A half is two neighbouring outputs: eight bytes of the one, then eight of the other. So a thread loads 16 bytes.
    """
    block = b_ptr + (halves.to(tl.int64) // (_LANES // 2) * panel_bytes(rank, 4) + first_rank // 16 * _BLOCK_BYTES)
    codes_of_half = block + _SCALE_BYTES + halves % (_LANES // 2) * 16
    codes = tl.load(codes_of_half[:, None] + tl.arange(0, 16)[None, :], mask=mask[:, None], other=0)
    scales_of_half = _bfloat16_at(block + halves % (_LANES // 2) * 4)
    scales = tl.load(scales_of_half[:, None] + tl.arange(0, 2)[None, :], mask=mask[:, None], other=0.0)
    return codes, scales.to(tl.float32)


@triton.jit
def load_magnitude(arena_ptr, offset, outputs, mask, BITS: tl.constexpr):
    """A DoRA magnitude, as float32."""
    if BITS == 0:
        values = tl.load(arena_ptr + offset + outputs, mask=mask, other=0.0).to(tl.float32)
    else:
        values = tl.load((arena_ptr + offset).to(tl.pointer_type(tl.float32)) + outputs, mask=mask, other=0.0)
    return values


@triton.jit
def _bfloat16_at(ptr):
    return ptr.to(tl.pointer_type(tl.bfloat16))


_SPLITS = 32
"""Programs that share a B."""


def order_codes(
    arena: torch.Tensor, ranks: torch.Tensor, b_offsets: torch.Tensor, out_features: torch.Tensor, max_rank: int
) -> None:
    """See `multilora_kernels.adapter_order.order_codes`."""
    constants = order_constants(max_rank, adapter_codes.CODE_BITS[arena.dtype])
    if len(ranks):
        order_codes_kernel[len(ranks), _SPLITS](arena_of_kernels(arena), ranks, b_offsets, out_features, **constants)


def order_constants(max_rank: int, code_bits: int) -> dict[str, Any]:
    """The constants of the kernel."""
    columns = next_power_of_2(max_rank) if code_bits == 8 else adapter_codes.BLOCK_COLUMNS // 2
    return {"BLOCK_C": columns, "CODE_BITS": code_bits, "num_warps": 1 if columns <= 32 else 4}


# An adapter's numbers lie in rows of one table: whether a row begins at a multiple of sixteen bytes depends on how many
# matrices the adapter has.
@triton.jit(do_not_specialize=["ranks_ptr", "b_offset_ptr", "out_features_ptr"])
def order_codes_kernel(
    arena_ptr, ranks_ptr, b_offset_ptr, out_features_ptr, BLOCK_C: tl.constexpr, CODE_BITS: tl.constexpr
):
    """One program: each so many-th panel of a B."""
    b = tl.program_id(0)
    rank = tl.load(ranks_ptr + b)
    b_ptr = arena_ptr + tl.load(b_offset_ptr + b)
    num_panels = (tl.load(out_features_ptr + b) + _LANES - 1) // _LANES
    lanes = tl.arange(0, 16)[None, :]
    columns = tl.arange(0, BLOCK_C)[:, None]
    for panel in range(tl.program_id(1), num_panels, tl.num_programs(1)):
        block_ptr = b_ptr + panel * panel_bytes(rank, CODE_BITS)
        for first in range(0, rank, BLOCK_C if CODE_BITS == 8 else _BLOCK_COLUMNS):
            count = rank if CODE_BITS == 8 else (tl.minimum(rank - first, _BLOCK_COLUMNS) + 1) // 2
            mask = columns < count
            codes_ptr = block_ptr + _SCALE_BYTES
            codes = tl.load(codes_ptr + columns * _LANES + lanes, mask=mask, other=0)
            # Each thread has its bytes before one of them writes over them.
            tl.debug_barrier()
            tl.store(codes_ptr + lanes * count + columns, codes, mask=mask)
            block_ptr += _BLOCK_BYTES
