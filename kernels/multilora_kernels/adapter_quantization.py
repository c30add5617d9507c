"""Makes the codes of `adapter_codes` from floats, by a compiled kernel, or by torch if there is no compiler."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from multilora_kernels.adapter_codes import BLOCK_COLUMNS, CODE_BITS, LANES, a_header_bytes, panel_bytes
from multilora_kernels.cpu import quantize_compiled

_LARGEST_CODE = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""Of 8 bits."""

_LARGEST_SCALE = {
    arena: torch.finfo(torch.bfloat16).max / divisor
    for arena, divisor in {torch.int8: 128, torch.float8_e4m3fn: 448, torch.uint8: 8}.items()
}
"""So that every code times its scale is finite."""


def quantize_a(a: torch.Tensor, arena: torch.dtype) -> torch.Tensor:
    """A [rank, in], float32 and finite, on the CPU, as uint8 [a_bytes]. arena: the dtype of an arena of such codes."""
    codes = quantize_compiled("a", a, arena)
    return reference_a(a, arena) if codes is None else codes


def quantize_b(b: torch.Tensor, arena: torch.dtype) -> torch.Tensor:
    """B [out, rank], float32 and finite, on the CPU, as uint8 [b_bytes]."""
    codes = quantize_compiled("b", b, arena)
    return reference_b(b, arena) if codes is None else codes


def reference_a(a: torch.Tensor, arena: torch.dtype) -> torch.Tensor:
    """`quantize_a` by torch's operators."""
    if CODE_BITS[arena] == 4:
        return _pack_blocks(_columns_of_inputs(a))
    codes, scales = _byte_codes(a, 1, arena, torch.float32)
    header = F.pad(_bytes(scales).flatten(), (0, a_header_bytes(len(a)) - 4 * len(a)))
    return torch.cat((header, _bytes(codes).flatten()))


def reference_b(b: torch.Tensor, arena: torch.dtype) -> torch.Tensor:
    """`quantize_b` by torch's operators."""
    columns = _columns_of_outputs(b)
    if CODE_BITS[arena] == 4:
        return _pack_blocks(columns)
    codes, scales = _byte_codes(columns, 1, arena, torch.bfloat16)
    return torch.cat((_bytes(scales).flatten(1), _bytes(codes).flatten(1)), dim=1).flatten()


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
    codes, scales = _nibble_codes(blocks, 2)
    pairs = _bytes(codes & 15)
    stored = torch.cat((_bytes(scales).flatten(2), (pairs[:, :, 0::2] | pairs[:, :, 1::2] << 4).flatten(2)), dim=2)
    return stored.flatten(1)[:, : panel_bytes(count, 4)].flatten()


def _byte_codes(
    values: torch.Tensor, dim: int, arena: torch.dtype, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of 8 bits of the shape of `values`, and the scales that groups of values along `dim` share, without `dim`.

    The largest magnitude becomes the largest code.
    """
    most = _LARGEST_CODE[arena]
    scale = _scale(values.abs().amax(dim, keepdim=True) / most, arena, scale_dtype)
    quotients = _quotients(values, scale).clamp_(-most, most)
    codes = quotients.round_() if arena == torch.int8 else quotients
    return codes.to(arena), scale.to(scale_dtype).squeeze(dim)


def _nibble_codes(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_byte_codes`, but codes of 4 bits, as int8.

    By the largest scale, the value of the largest magnitude becomes -8. Two smaller scales cut the largest values off.
    The scale with the least squared error is taken.
    """
    low, high = values.amin(dim, keepdim=True), values.amax(dim, keepdim=True)
    scale = _least_error_scale(values, torch.where(high < -low, low, high), dim)
    return _rounded_nibbles(values, scale).to(torch.int8), scale.to(torch.bfloat16).squeeze(dim)


def _least_error_scale(values: torch.Tensor, largest: torch.Tensor, dim: int) -> torch.Tensor:
    scale = _scale(largest / -8, torch.uint8, torch.bfloat16)
    error = _squared_error(values, scale, dim)
    for share in _SHARES:
        other = _scale(largest / -8 * share, torch.uint8, torch.bfloat16)
        other_error = _squared_error(values, other, dim)
        is_better = other_error < error
        scale, error = torch.where(is_better, other, scale), torch.where(is_better, other_error, error)
    return scale


_SHARES = (0.92, 0.84)


def _scale(wanted: torch.Tensor, arena: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """The nearest scale that can be stored, as float32."""
    limit = _LARGEST_SCALE[arena]
    return wanted.clamp(-limit, limit).to(dtype).float()


def _quotients(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values / torch.where(scale == 0, 1.0, scale)


def _rounded_nibbles(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _quotients(values, scale).round_().clamp_(-8, 7)


def _squared_error(values: torch.Tensor, scale: torch.Tensor, dim: int) -> torch.Tensor:
    """The error of 4-bit codes."""
    return _rounded_nibbles(values, scale).mul_(scale).sub_(values).square_().sum(dim, keepdim=True)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)
