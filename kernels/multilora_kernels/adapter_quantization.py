"""Floats of adapters become the codes of `adapter_codes`: compiled, or by torch where there is no compiler."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from multilora_kernels.adapter_codes import BLOCK_COLUMNS, LANES, a_header_bytes, panel_bytes
from multilora_kernels.cpu import quantize_compiled

_LARGEST_SCALE = {8: torch.finfo(torch.bfloat16).max / 128, 4: torch.finfo(torch.bfloat16).max / 8}
"""So that every code times its scale is finite."""


def quantize_a(a: torch.Tensor, bits: int) -> torch.Tensor:
    """A [rank, in], float32 and finite, on the CPU, as uint8 [a_bytes]."""
    codes = quantize_compiled("a", a, bits)
    return reference_a(a, bits) if codes is None else codes


def quantize_b(b: torch.Tensor, bits: int) -> torch.Tensor:
    """B [out, rank], float32 and finite, on the CPU, as uint8 [b_bytes]."""
    codes = quantize_compiled("b", b, bits)
    return reference_b(b, bits) if codes is None else codes


def reference_a(a: torch.Tensor, bits: int) -> torch.Tensor:
    """`quantize_a` by torch's operators."""
    if bits == 4:
        return _pack_blocks(_columns_of_inputs(a))
    codes, scales = _codes_of(a, 1, 8, torch.float32)
    header = F.pad(_bytes(scales).flatten(), (0, a_header_bytes(len(a)) - 4 * len(a)))
    return torch.cat((header, _bytes(codes).flatten()))


def reference_b(b: torch.Tensor, bits: int) -> torch.Tensor:
    """`quantize_b` by torch's operators."""
    columns = _columns_of_outputs(b)
    if bits == 4:
        return _pack_blocks(columns)
    codes, scales = _codes_of(columns, 1, 8, torch.bfloat16)
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
    codes, scales = _codes_of(blocks, 2, 4, torch.bfloat16)
    pairs = _bytes(codes & 15)
    stored = torch.cat((_bytes(scales).flatten(2), (pairs[:, :, 0::2] | pairs[:, :, 1::2] << 4).flatten(2)), dim=2)
    return stored.flatten(1)[:, : panel_bytes(count, 4)].flatten()


def _codes_of(values: torch.Tensor, dim: int, bits: int, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes of the shape of `values`, and the scales that groups of values along `dim` share, without `dim`.

    8 bits: the largest magnitude becomes 127 or -127. 4 bits: the value of the largest magnitude becomes -8; of that
    scale and two smaller ones, which cut the largest values off, the one is taken whose squared error is least.
    """
    if bits == 8:
        scale, least, most = _scale(values.abs().amax(dim, keepdim=True) / 127, bits, scale_dtype), -127, 127
    else:
        low, high = values.amin(dim, keepdim=True), values.amax(dim, keepdim=True)
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


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)
