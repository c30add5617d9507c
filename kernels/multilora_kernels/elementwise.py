"""The operators between a layer's matrix products: one call each on a CPU (float32), one launch each on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from multilora_kernels import reference
from multilora_kernels.dispatch import operator
from multilora_kernels.interpreter import has_gpu_operators


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """s / sqrt(mean(s^2) + eps) * weight and s, for s = x + update, with the mean in float32.

    x, update: [num_tokens, size]; weight: [size].
    """
    return _call("add_rms_norm", x, update, weight, eps)  # type: ignore[no-any-return]


def add_layer_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """d / sqrt(mean(d^2) + eps) * weight + bias and s, for s = x + update and d = s - mean(s), with float32 means.

    x, update: [num_tokens, size]; weight: [size]; bias: [size], or None for none.
    """
    return _call("add_layer_norm", x, update, weight, bias, eps)  # type: ignore[no-any-return]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. gate_up: [num_tokens, 2 * size], a row's gate before its up. Returns [num_tokens, size]."""
    return _call("silu_mul", gate_up)  # type: ignore[no-any-return]


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu_tanh(gate) * up, with the arguments of `silu_mul`."""
    return _call("gelu_tanh_mul", gate_up)  # type: ignore[no-any-return]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), arXiv:1606.08415. x: [num_tokens, size], as the result."""
    return _call("gelu_tanh", x)  # type: ignore[no-any-return]


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x / 2 * (1 + erf(x / sqrt(2))), arXiv:1606.08415. x: [num_tokens, size], as the result."""
    return _call("gelu", x)  # type: ignore[no-any-return]


def _call(name: str, x: torch.Tensor, *others: Any) -> Any:
    """Compute the operator with this name. The compiled CPU operators take float32 only."""
    is_reference = x.dtype != torch.float32 and not has_gpu_operators(x.device)
    return (getattr(reference, name) if is_reference else operator(name, x))(x, *others)
