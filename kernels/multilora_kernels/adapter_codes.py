"""Adapters stored as codes of 8 or 4 bits with scales: the meaning of the bytes. The dtype of the arena tells the kind.

*int8*. A [rank, in] is `rank` float32 scales, filled up with zeros to a multiple of 64 bytes, then the int8 codes
[rank, in]: A[j, k] = scale[j] * code[j, k]. B [out, rank] is panels of 16 outputs; the last panel is filled up with
zeros. A panel is 16 bfloat16 scales, then the int8 codes [rank, 16]: B[n, j] = scale[n] * code[j, n]. So a kernel reads
a panel from one end to the other, and has 16 outputs side by side.

*fp8*. As int8, but each code is a float8_e4m3fn. The largest magnitude that shares a scale has the code 448.

*int4*. The panels of int8, cut into blocks of at most 16 columns. Each block has 16 scales of its own. A block is its
scales, then [columns / 2, 16] bytes. A byte holds an even column in its lower four bits and the next column in its
upper four bits, as two's complement. In B, the columns are the ranks. A has a panel for each rank, in which the inputs
16 c .. 16 c + 15 are column c.

The order of bytes is a CPU's, on the wire and in every tier but a GPU's. There the codes of a B lie output by output:
`adapter_order` brings a panel of 8 bits to [16, rank], and a block of 4 bits to [16, columns / 2]. Sizes, places and
scales stay.

For matrices of normally distributed values, the update's error |B' A' - B A| / |B A| is at most 1.1 % for int8, 4.3 %
for fp8 and 11 % for int4. At rank 16 and 576 inputs it is 0.9 %, 3.4 % and 10.3 %. The codes of a row of A depend on no
other row, and the codes of an output of B on no other output.
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

CODE_BITS = {torch.int8: 8, torch.float8_e4m3fn: 8, torch.uint8: 4}
"""Bits of a code by the dtype of the arena: int8, fp8 and int4."""


def a_header_bytes(rank: int) -> int:
    """The bytes of an A before its 8-bit codes."""
    return _round_up(4 * rank, _HEADER_UNIT)


def panel_bytes(columns: int, bits: int) -> int:
    """The bytes of a panel with `columns` columns: the ranks of B, or for 4 bits the columns of inputs of A."""
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


def dequantize_a(stored: torch.Tensor, rank: int, in_features: int, arena: torch.dtype) -> torch.Tensor:
    """The values of the bytes of an A: [rank, in_features], float32. stored: uint8; other bytes may follow A."""
    bits = CODE_BITS[arena]
    stored = stored[: a_bytes(rank, in_features, bits)]
    if bits == 4:
        return _unpack_blocks(stored, rank, -(-in_features // LANES)).flatten(1)[:, :in_features].contiguous()
    header = a_header_bytes(rank)
    scales = stored[: 4 * rank].clone().view(torch.float32)
    return stored[header:].view(arena).view(rank, in_features).float() * scales[:, None]


def dequantize_b(stored: torch.Tensor, out_features: int, rank: int, arena: torch.dtype) -> torch.Tensor:
    """The values of the bytes of a B: [out_features, rank], float32. stored: uint8; other bytes may follow B."""
    bits = CODE_BITS[arena]
    stored = stored[: b_bytes(out_features, rank, bits)]
    panels = -(-out_features // LANES)
    if bits == 4:
        columns = _unpack_blocks(stored, panels, rank)
    else:
        rows = stored.view(panels, -1)
        scales = rows[:, :SCALE_BYTES].clone().view(torch.bfloat16).float()
        columns = rows[:, SCALE_BYTES:].clone().view(arena).view(panels, rank, LANES).float() * scales[:, None]
    return columns.mT.reshape(panels * LANES, rank)[:out_features]


def gather_b(
    arena: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor, ranks: torch.Tensor, max_rank: int
) -> torch.Tensor:
    """A row of each of some Bs, [n, max_rank] float32; columns from a B's rank up are undefined.

    arena: [num_elements]. offsets, rows, ranks: [n] int64: the places of the Bs in the arena, the row of each that is
    wanted, and their ranks. PyTorch on the device of the arena, which it does not wait for.
    """
    stored, columns = arena.view(torch.uint8), torch.arange(max_rank, device=arena.device)
    panels, lanes, last = rows // LANES, (rows % LANES)[:, None], arena.numel() - 1
    if CODE_BITS[arena.dtype] == 8:
        starts = (offsets + panels * (SCALE_BYTES + LANES * ranks))[:, None]
        codes = stored[(starts + SCALE_BYTES + LANES * columns + lanes).clamp_(max=last)].view(arena.dtype).float()
        return codes * _scales(stored, starts + 2 * lanes)
    whole, rest = ranks // BLOCK_COLUMNS, ranks % BLOCK_COLUMNS
    rest_bytes = torch.where(rest > 0, SCALE_BYTES + LANES * ((rest + 1) // 2), 0)
    starts = (offsets + panels * (whole * _block_bytes(BLOCK_COLUMNS) + rest_bytes))[:, None]
    blocks = starts + columns // BLOCK_COLUMNS * _block_bytes(BLOCK_COLUMNS)
    inner = columns % BLOCK_COLUMNS
    pairs = stored[(blocks + SCALE_BYTES + inner // 2 * LANES + lanes).clamp_(max=last)]
    codes = torch.where(inner % 2 == 0, pairs << 4, pairs & 0xF0).view(torch.int8) // 16
    return codes * _scales(stored, (blocks + 2 * lanes).clamp_(max=last - 1))


def _scales(stored: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The scales, float32, that begin at these bytes."""
    return torch.stack((stored[places], stored[places + 1]), dim=-1).view(torch.bfloat16).squeeze(-1).float()


def _unpack_blocks(stored: torch.Tensor, panels: int, columns: int) -> torch.Tensor:
    """[panels, columns, 16], float32."""
    block = _block_bytes(BLOCK_COLUMNS)
    rows = stored.view(panels, -1)
    blocks = F.pad(rows, (0, -rows.shape[1] % block)).view(panels, -1, block)
    scales = blocks[:, :, :SCALE_BYTES].clone().view(torch.bfloat16).float()
    pairs = blocks[:, :, SCALE_BYTES:].unflatten(2, (-1, LANES))
    codes = torch.stack((pairs << 4, pairs & 0xF0), dim=3).flatten(2, 3).view(torch.int8) // 16
    return (codes * scales[:, :, None]).flatten(1, 2)[:, :columns]


def _block_bytes(columns: int) -> int:
    return SCALE_BYTES + LANES * -(-columns // 2)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
