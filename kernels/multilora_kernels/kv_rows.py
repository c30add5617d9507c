"""Rows of a KV cache. A row is the elements of one head of one token, as floats or as 8-bit codes with a scale.

A row of int8 or float8_e4m3fn is head_dim codes and, in its last four bytes, a float32 scale. A GPU's caches have the
scales apart (`KVCodes`), so that rows begin where loads of 16 bytes may.

    scale = max_d |x[d]| / c,  code[d] = round(x[d] * c / max_d |x[d]|),  x[d] ~ code[d] * scale

with c the largest code, 127 or 448. An element of int8 is off by at most scale / 2, which is 1/254 of the largest
element of its head. An element of float8_e4m3fn is off by at most 1/16 of itself or, below 2^-6 scale, by 2^-10 scale.
A row depends only on its own head and token, not on what else is computed with it. If no element reaches 2^-100, all
become zero. If an element is infinite or NaN, all become NaN, as attention to them would be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCALE_BYTES = 4
LARGEST_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code, by the type of codes."""
SMALLEST_SCALED = 2.0**-100
"""The smallest largest element that counts: the inverse of a smaller one may overflow."""


@dataclass(frozen=True)
class KVCodes:
    """A cache of codes with their scales apart, as a GPU reads it.

    codes: [..., num_slots, num_kv_heads, head_dim], int8 or float8_e4m3fn. scales: float32 [..., num_kv_heads,
    num_slots].
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> KVCodes:
        """shape: of the same cache as rows."""
        *layers, num_slots, num_heads, row = shape
        codes = torch.zeros(*shape[:-1], row - SCALE_BYTES, dtype=dtype, device=device)
        return cls(codes, torch.zeros(*layers, num_heads, num_slots, dtype=torch.float32, device=device))

    @classmethod
    def of_rows(cls, rows: torch.Tensor) -> KVCodes:
        """rows: [..., num_slots, num_kv_heads, head_dim + SCALE_BYTES], as `quantize_rows` has them; copied."""
        codes, scales = _bytes(rows).split_with_sizes((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
        scales = scales.contiguous().view(torch.float32).squeeze(-1).transpose(-1, -2)
        return cls(codes.contiguous().view(rows.dtype), scales.contiguous())

    def rows(self) -> torch.Tensor:
        """A copy with each scale after its codes."""
        scales = self.scales.transpose(-1, -2).contiguous().unsqueeze(-1).view(torch.uint8)
        return torch.cat((_bytes(self.codes), scales), dim=-1).view(self.codes.dtype)

    def __getitem__(self, layer: int) -> KVCodes:
        return KVCodes(self.codes[layer], self.scales[layer])

    def clone(self) -> KVCodes:
        return KVCodes(self.codes.clone(), self.scales.clone())

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


KVRows = torch.Tensor | KVCodes
"""A cache, of one layer [num_slots, num_kv_heads, row] or of several."""


def kv_row_size(head_dim: int, dtype: torch.dtype) -> int:
    """The elements of a row in a cache of this type: head_dim, and for codes the bytes of the scale."""
    return head_dim + (SCALE_BYTES if dtype in LARGEST_CODES else 0)


def kv_head_dim(cache: KVRows) -> int:
    """head_dim of a cache."""
    if isinstance(cache, KVCodes):
        return cache.codes.shape[-1]
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype in LARGEST_CODES else 0)


def num_kv_heads(cache: KVRows) -> int:
    """Key-value heads of a cache."""
    return (cache.codes if isinstance(cache, KVCodes) else cache).shape[-2]


def quantize_rows(x: torch.Tensor, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Codes and scales of x [..., head_dim], computed in float32. Returns [..., head_dim + SCALE_BYTES] in `dtype`."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    is_scaled = (largest >= SMALLEST_SCALED) & largest.isfinite()
    # Tensors divide tensors here. A number divided by a tensor would be rounded twice. So would a tensor divided by a
    # number on a GPU, where PyTorch multiplies by the number's inverse.
    largest_code = torch.full_like(largest, LARGEST_CODES[dtype])
    per_unit = largest_code / largest
    values = torch.where(is_scaled, x * per_unit, 0.0)
    codes = (values.round() if dtype == torch.int8 else values).to(dtype)
    unscaled = torch.where(largest.isfinite(), 0.0, torch.nan)
    scales = torch.where(is_scaled, largest / largest_code, unscaled)
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1).view(dtype)


def dequantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """The elements of rows that `quantize_rows` made: float32 [..., head_dim]."""
    codes, scales = rows.split_with_sizes((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    return codes.float() * scales.contiguous().view(torch.float32)


def store_rows(x: torch.Tensor, cache: KVRows, slots: torch.Tensor) -> None:
    """Put keys or values of tokens into a cache, for `attention.paged_attention`.

    x: [num_tokens, num_kv_heads, head_dim], floating. slots: [num_tokens] int64.
    """
    if isinstance(cache, KVCodes):
        new = KVCodes.of_rows(quantize_rows(x, cache.dtype))
        _bytes(cache.codes).index_copy_(0, slots, _bytes(new.codes))
        cache.scales.index_copy_(1, slots, new.scales)
    elif cache.dtype in LARGEST_CODES:
        _bytes(cache).index_copy_(0, slots, _bytes(quantize_rows(x, cache.dtype)))
    else:
        cache.index_copy_(0, slots, x.to(cache.dtype))


def load_rows(cache: KVRows, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Heads of a cache: [len(slots), num_kv_heads, head_dim] of a floating dtype."""
    if isinstance(cache, KVCodes):
        codes = _bytes(cache.codes).index_select(0, slots).view(cache.dtype)
        return (codes.float() * cache.scales.index_select(1, slots).T[..., None]).to(dtype)
    # index_select copies whole rows; plain indexing is several times slower on a CPU.
    if cache.dtype in LARGEST_CODES:
        return dequantize_rows(_bytes(cache).index_select(0, slots).view(cache.dtype)).to(dtype)
    return cache.index_select(0, slots).to(dtype)


def copy_slots(source: KVRows, target: KVRows, slots: torch.Tensor) -> None:
    """Copy the rows of some slots from one cache of a layer to another."""
    if isinstance(source, KVCodes):
        assert isinstance(target, KVCodes)
        target.scales[:, slots] = source.scales[:, slots]
        source, target = _bytes(source.codes), _bytes(target.codes)
    assert isinstance(target, torch.Tensor)
    target[slots] = source[slots]


def copy_blocks(cache: KVRows, block_size: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy blocks of a cache of several layers; no block is a source and a target."""
    if isinstance(cache, KVCodes):
        scales = cache.scales.unflatten(-1, (-1, block_size))
        scales[:, :, targets] = scales[:, :, sources]
        cache = cache.codes
    # As bytes where they are codes: PyTorch copies no blocks of float8.
    blocks = (_bytes(cache) if cache.dtype.itemsize == 1 else cache).unflatten(1, (-1, block_size))
    blocks[:, targets] = blocks[:, sources]


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """The same memory, of a type whose rows PyTorch can copy."""
    return codes.view(torch.uint8)
