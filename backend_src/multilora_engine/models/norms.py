"""Normalisations: RMS and layer norm, alone and after the residual addition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from multilora_kernels import add_layer_norm, add_rms_norm


class Norm(Protocol):
    """A normalisation over the last dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x of any shape with the last dimension of the weight."""
        ...

    def add(self, x: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """norm(x + update), and x + update."""
        ...


@dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, with the mean in float32 (arXiv:1910.07467)."""

    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add(self, x: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, update, self.weight, self.eps)


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, with mean and variance in float32 (arXiv:1607.06450)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_layer_norm(x, update, self.weight, self.bias, self.eps)
