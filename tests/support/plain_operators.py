"""The GPU's operators by plain PyTorch, with the arguments and results that `multilora_kernels.cuda` has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from multilora_kernels import cuda, reference
from multilora_kernels.quantized import QuantizedWeight
from multilora_kernels.segments import reference_segments


def _lora_segments(mapping: torch.Tensor, max_loras: int, chunk_size: int, capacity: int) -> tuple[torch.Tensor, ...]:
    segments = reference_segments(mapping, max_loras, chunk_size, capacity)
    return segments.permutation, segments.chunk_start, segments.chunk_length, segments.chunk_lora_index


def _quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.rows(0, weight.shape[0]).to(x.dtype), bias)


def _order_codes(*_: object) -> None:
    """Plain operators read codes in the order that they have on the wire."""


_OWN = {"lora_segments": _lora_segments, "order_codes": _order_codes, "quantized_linear": _quantized_linear}

PLAIN_OPERATORS: Mapping[str, Callable[..., Any]] = {
    name: _OWN.get(name) or getattr(reference, name) for name in cuda.__all__
}
"""By name."""
