"""Adapters stored as codes of 8 or 4 bits with scales: the meaning of the bytes, and how floats become them.

*int8*. A [rank, in] is `rank` scales, float32, filled up with zeros to a multiple of 64 bytes, then the codes
[rank, in], int8: A[j, k] = scale[j] * code[j, k]. B [out, rank] is panels of 16 outputs, the last one filled up with
zeros; a panel is 16 scales, bfloat16, then the codes [rank, 16], int8: B[n, j] = scale[n] * code[j, n]. A kernel so
reads a panel from one end to the other, and has 16 outputs side by side.

*int4*. The same panels, cut into blocks of at most 16 columns, each with 16 scales of its own; a block is its scales,
then [columns / 2, 16] bytes, which hold an even column in their lower and the odd one after it in their upper four bits
as two's complement. B has its ranks as columns. A has a panel for each rank: the inputs 16 c .. 16 c + 15 are its
column c.

The update's error |B' A' - B A| / |B A|, of matrices of normally distributed values, is at most 1.1 % for int8 and 11 %
for int4; at rank 16 and 576 inputs it is 0.9 % and 10.3 %. Codes of a row of A depend on no other row, and those of an
output on no other output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

LANES = 16
"""Outputs of a panel; inputs of a column of A."""

BLOCK_COLUMNS = 16
"""Columns of a block of 4-bit codes."""

SCALE_BYTES = 2 * LANES
"""Bytes of the scales of a panel or block."""

_HEADER_UNIT = 64

CODE_BITS = {torch.int8: 8, torch.uint8: 4}
"""Bits of a code by the dtype of the arena."""

_LARGEST_SCALE = {8: torch.finfo(torch.bfloat16).max / 128, 4: torch.finfo(torch.bfloat16).max / 8}
"""So that every code times its scale is finite."""


def a_header_bytes(rank: int) -> int:
    """Bytes before the codes of an int8 A."""
    return _round_up(4 * rank, _HEADER_UNIT)


def panel_bytes(columns: int, bits: int) -> int:
    """Bytes of a panel of B with so many ranks, or for 4 bits of a row of A with so many columns of inputs."""
    if bits == 8:
        return SCALE_BYTES + LANES * columns
    whole, rest = divmod(columns, BLOCK_COLUMNS)
    return whole * _block_bytes(BLOCK_COLUMNS) + (_block_bytes(rest) if rest else 0)


def a_bytes(rank: int, in_features: int, bits: int) -> int:
    """Bytes of A."""
    if bits == 8:
        return a_header_bytes(rank) + rank * in_features
    return rank * panel_bytes(-(-in_features // LANES), bits)


def b_bytes(out_features: int, rank: int, bits: int) -> int:
    """Bytes of B."""
    return -(-out_features // LANES) * panel_bytes(rank, bits)


def quantize_a(a: torch.Tensor, bits: int) -> torch.Tensor:
    """A [rank, in], float32 and finite, as uint8 [a_bytes]."""
    if bits == 4:
        return _pack_blocks(_columns_of_inputs(a))
    codes, scales = _codes_of(a, 1, 8, torch.float32)
    header = F.pad(_bytes(scales).flatten(), (0, a_header_bytes(len(a)) - 4 * len(a)))
    return torch.cat((header, _bytes(codes).flatten()))


def quantize_b(b: torch.Tensor, bits: int) -> torch.Tensor:
    """B [out, rank], float32 and finite, as uint8 [b_bytes]."""
    columns = _columns_of_outputs(b)
    if bits == 4:
        return _pack_blocks(columns)
    codes, scales = _codes_of(columns, 1, 8, torch.bfloat16)
    return torch.cat((_bytes(scales).flatten(1), _bytes(codes).flatten(1)), dim=1).flatten()


def dequantize_a(stored: torch.Tensor, rank: int, in_features: int, bits: int) -> torch.Tensor:
    """The values of the bytes of an A: [rank, in_features], float32. stored: uint8, may go on behind A."""
    stored = stored[: a_bytes(rank, in_features, bits)]
    if bits == 4:
        return _unpack_blocks(stored, rank, -(-in_features // LANES)).flatten(1)[:, :in_features].contiguous()
    header = a_header_bytes(rank)
    scales = stored[: 4 * rank].clone().view(torch.float32)
    return stored[header:].view(torch.int8).view(rank, in_features) * scales[:, None]


def dequantize_b(stored: torch.Tensor, out_features: int, rank: int, bits: int) -> torch.Tensor:
    """The values of the bytes of a B: [out_features, rank], float32. stored: uint8, may go on behind B."""
    stored = stored[: b_bytes(out_features, rank, bits)]
    panels = -(-out_features // LANES)
    if bits == 4:
        columns = _unpack_blocks(stored, panels, rank)
    else:
        rows = stored.view(panels, -1)
        scales = rows[:, :SCALE_BYTES].clone().view(torch.bfloat16).float()
        columns = rows[:, SCALE_BYTES:].clone().view(torch.int8).view(panels, rank, LANES) * scales[:, None]
    return columns.mT.reshape(panels * LANES, rank)[:out_features]


def _columns_of_inputs(a: torch.Tensor) -> torch.Tensor:
    """[rank, columns, 16]."""
    padding = -a.shape[1] % LANES
    return (F.pad(a, (0, padding)) if padding else a).view(len(a), -1, LANES)


def _columns_of_outputs(b: torch.Tensor) -> torch.Tensor:
    """[panels, rank, 16]."""
    padding = -b.shape[0] % LANES
    return (F.pad(b, (0, 0, 0, padding)) if padding else b).view(-1, LANES, b.shape[1]).mT.contiguous()


def _pack_blocks(columns: torch.Tensor) -> torch.Tensor:
    """The bytes of panels [panels, columns, 16] in 4-bit codes."""
    count = columns.shape[1]
    padding = -count % BLOCK_COLUMNS
    blocks = (F.pad(columns, (0, 0, 0, padding)) if padding else columns).view(len(columns), -1, BLOCK_COLUMNS, LANES)
    codes, scales = _codes_of(blocks, 2, 4, torch.bfloat16)
    pairs = _bytes(codes & 15)
    stored = torch.cat((_bytes(scales).flatten(2), (pairs[:, :, 0::2] | pairs[:, :, 1::2] << 4).flatten(2)), dim=2)
    return stored.flatten(1)[:, : panel_bytes(count, 4)].flatten()


def _unpack_blocks(stored: torch.Tensor, panels: int, columns: int) -> torch.Tensor:
    """[panels, columns, 16], float32."""
    block = _block_bytes(BLOCK_COLUMNS)
    rows = stored.view(panels, -1)
    blocks = F.pad(rows, (0, -rows.shape[1] % block)).view(panels, -1, block)
    scales = blocks[:, :, :SCALE_BYTES].clone().view(torch.bfloat16).float()
    pairs = blocks[:, :, SCALE_BYTES:].unflatten(2, (-1, LANES))
    codes = torch.stack((pairs << 4, pairs & 0xF0), dim=3).flatten(2, 3).view(torch.int8) // 16
    return (codes * scales[:, :, None]).flatten(1, 2)[:, :columns]


def _codes_of(values: torch.Tensor, dim: int, bits: int, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes of the shape of `values`, and the scales that groups of values along `dim` share, without `dim`.

    8 bits: the largest magnitude becomes 127 or -127. 4 bits: the value of the largest magnitude becomes -8; of that
    scale and two smaller ones, which cut the largest values off, the one is taken whose squared error is least.
    """
    low, high = values.amin(dim, keepdim=True), values.amax(dim, keepdim=True)
    if bits == 8:
        scale, least, most = _scale(torch.maximum(high, -low) / 127, bits, scale_dtype), -127, 127
    else:
        scale, least, most = _least_error_scale(values, torch.where(high < -low, low, high), dim, scale_dtype), -8, 7
    return _rounded(values, scale, least, most).to(torch.int8), scale.to(scale_dtype).squeeze(dim)


def _least_error_scale(values: torch.Tensor, largest: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    scale = _scale(largest / -8, 4, dtype)
    error = _squared_error(values, scale, dim)
    for share in _SHARES:
        other = _scale(largest / -8 * share, 4, dtype)
        other_error = _squared_error(values, other, dim)
        is_better = other_error < error
        scale, error = torch.where(is_better, other, scale), torch.where(is_better, other_error, error)
    return scale


_SHARES = (0.92, 0.84)


def _scale(wanted: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The nearest scale that can be stored, as float32."""
    limit = _LARGEST_SCALE[bits]
    return wanted.clamp(-limit, limit).to(dtype).float()


def _rounded(values: torch.Tensor, scale: torch.Tensor, low: int, high: int) -> torch.Tensor:
    divisor = torch.where(scale == 0, 1.0, scale)
    return (values / divisor).round_().clamp_(low, high)


def _squared_error(values: torch.Tensor, scale: torch.Tensor, dim: int) -> torch.Tensor:
    """The error of 4-bit codes."""
    return _rounded(values, scale, -8, 7).mul_(scale).sub_(values).square_().sum(dim, keepdim=True)


def _block_bytes(columns: int) -> int:
    return SCALE_BYTES + LANES * -(-columns // 2)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
