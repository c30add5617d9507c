"""Weights of random codes, for measurements."""

from __future__ import annotations

import torch

from multilora_kernels import CodeType, QuantizedWeight


def fill_with_codes(weight: QuantizedWeight, device: torch.device, scale: float = 1.0) -> None:
    """Random codes with zeros in the middle of their range, as symmetric checkpoints have them, and one scale."""
    out_features, in_features = weight.shape
    codes = torch.randint(0, 8, (out_features, in_features), dtype=torch.uint8, device=device)
    scales = torch.full((out_features, weight.num_groups), scale, device=device)
    middle = 1 << (weight.code_type.bits - 1)
    zeros = None if weight.code_type is CodeType.FP8 else torch.full_like(scales, middle, dtype=torch.uint8)
    weight.copy_rows(0, codes, scales, zeros)
