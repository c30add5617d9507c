"""Loading tiles of A and B that are stored as codes: see `adapter_codes`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from multilora_kernels import adapter_codes
from multilora_kernels.cuda.tiles import float8_values

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
    """The places of the codes of 8 bits of columns of the panels of some lanes in a B."""
    panels = lanes.to(tl.int64) // _LANES * panel_bytes(num_columns, 8)
    return b_ptr + panels + _SCALE_BYTES + columns * _LANES + lanes % _LANES


@triton.jit
def code_values(codes):
    """The values of codes of 8 bits without their scales, as float32: int8, or uint8 as the bytes of float8_e4m3fn."""
    if codes.dtype == tl.uint8:
        codes = float8_values(codes)
    return codes.to(tl.float32)


@triton.jit
def load_int4(ptr, panels, columns, lanes, num_columns, mask):
    """Values in 4-bit codes, as float32, in which they are exact. Arguments broadcast to the shape of the result."""
    starts = ptr + panels.to(tl.int64) * panel_bytes(num_columns, 4) + columns // _BLOCK_COLUMNS * _BLOCK_BYTES
    scales = tl.load(_bfloat16_at(starts + lanes * 2), mask=mask, other=0.0).to(tl.float32)
    column = columns % _BLOCK_COLUMNS
    pairs = tl.load(starts + _SCALE_BYTES + column // 2 * _LANES + lanes, mask=mask, other=0).to(tl.int32)
    codes = ((pairs >> (column % 2 * 4)) & 15 ^ 8) - 8
    return codes.to(tl.float32) * scales


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
