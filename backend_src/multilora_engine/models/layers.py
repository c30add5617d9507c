"""The pieces of a Llama layer that hold weights: linears with batched LoRA, and RMS normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from multilora_engine.forward_batch import LoRABatch
from multilora_kernels import lora_apply

SLICES_PER_LAYER = 7
"""LoRA slices of a layer, in this order: q, k, v, o, gate, up, down."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, with the mean in float32."""
    return F.rms_norm(x, weight.shape, weight, eps)


class LoRALinear:
    """y = x W^T, plus each token's adapter, plus bias; W stacks the outputs of `slice_sizes` (q, k, v; gate, up).

    weight: [sum(slice_sizes), in_features]; bias: [sum(slice_sizes)] or None. Slice s of this linear is the column
    `first_slice + s` of the adapter tables. The bias comes last, because a DoRA magnitude scales only the weights.
    """

    def __init__(
        self,
        in_features: int,
        slice_sizes: Sequence[int],
        first_slice: int,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slice_sizes = tuple(slice_sizes)
        self.first_slice = first_slice
        self.weight = torch.empty(sum(slice_sizes), in_features, dtype=dtype, device=device)
        self.bias = torch.empty(sum(slice_sizes), dtype=dtype, device=device) if has_bias else None

    def forward(self, x: torch.Tensor, lora: LoRABatch | None) -> torch.Tensor:
        """x: [num_tokens, in_features]. Returns [num_tokens, sum(slice_sizes)], the slices side by side."""
        if lora is None:
            return F.linear(x, self.weight, self.bias)
        y = F.linear(x, self.weight)
        lora_apply(x, y, lora.tables, self.first_slice, self.slice_sizes, lora.segments)
        return y if self.bias is None else y.add_(self.bias)

    def checkpoint_tensors(self, *names: str) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors of the slices, by name: views into the fused weight and bias."""
        views = {f"{n}.weight": w for n, w in zip(names, self.weight.split_with_sizes(self.slice_sizes), strict=True)}
        if self.bias is not None:
            views |= {f"{n}.bias": b for n, b in zip(names, self.bias.split_with_sizes(self.slice_sizes), strict=True)}
        return views
