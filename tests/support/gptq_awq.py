"""Linears as AutoGPTQ and AutoAWQ write them, packed value by value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""AutoAWQ's `WQLinear_GEMM.from_linear`: nibble i of a word holds its output AWQ_ORDER[i]."""


@dataclass
class Codes:
    """w[o, i] = scales[group[i], o] * (codes[i, o] - zeros[group[i], o]), all integers below 2 ** bits."""

    bits: int
    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group: torch.Tensor

    def weight(self) -> torch.Tensor:
        """[out, in] float32."""
        steps = self.codes - self.zeros[self.group]
        return (self.scales.float()[self.group] * steps).T.contiguous()


def quantized(
    weight: torch.Tensor, bits: int, group_size: int, *, act_order: bool = False, symmetric: bool = False, seed: int = 0
) -> Codes:
    """Nearest codes of a weight [out, in], with float16 scales. act_order: inputs in groups of a random order."""
    out_features, in_features = weight.shape
    size = in_features if group_size == -1 else group_size
    group = torch.arange(in_features) // size
    if act_order:
        group = group[torch.randperm(in_features, generator=torch.Generator().manual_seed(seed))]
    num_groups, top = -(-in_features // size), 2**bits - 1
    zeros, scales = torch.empty(num_groups, out_features, dtype=torch.long), torch.empty(num_groups, out_features)
    for g in range(num_groups):
        values = weight[:, group == g]
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales[g] = ((high - low) / top).half().float().clamp(min=1e-4)
        zeros[g] = 2 ** (bits - 1) if symmetric else torch.round(-low / scales[g]).clamp(0, top)
    scales = scales.half()
    steps = torch.round(weight.T / scales.float()[group]).long() + zeros[group]
    return Codes(bits, steps.clamp(0, top), zeros, scales, group)


def gptq_tensors(codes: Codes, version: int = 1) -> dict[str, torch.Tensor]:
    """By the names behind a linear's. Version 1 stores zeros less one, modulo 2 ** bits."""
    zeros = (codes.zeros - (2 - version)) % 2**codes.bits
    return {
        "qweight": words(codes.codes.T, codes.bits).T.contiguous(),
        "qzeros": words(zeros, codes.bits),
        "scales": codes.scales,
        "g_idx": codes.group.to(torch.int32),
    }


def awq_tensors(codes: Codes) -> dict[str, torch.Tensor]:
    """By the names behind a linear's; the outputs must be a multiple of 8."""
    return {
        "qweight": words(_interleaved(codes.codes), 4),
        "qzeros": words(_interleaved(codes.zeros), 4),
        "scales": codes.scales,
    }


def _interleaved(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1)


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of integers as one long integer each, the first value lowest, cut into int32."""
    num_words = -(-values.shape[1] * bits // 32)
    rows = []
    for row in values.tolist():
        stream = sum(value << index * bits for index, value in enumerate(row))
        rows.append([stream >> 32 * word & 0xFFFFFFFF for word in range(num_words)])
    unsigned = torch.tensor(rows, dtype=torch.int64)
    return torch.where(unsigned < 2**31, unsigned, unsigned - 2**32).to(torch.int32)
