"""What lies between a layer's matrix products: by PyTorch on a CPU, in one launch each on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """s / sqrt(mean(s^2) + eps) * weight and s, for s = x + update, with the mean in float32.

    x, update: [num_tokens, size]; weight: [size].
    """
    if x.is_cuda:
        # Imported here: Triton comes with the CUDA builds of torch only.
        from multilora_kernels import cuda

        return cuda.add_rms_norm(x, update, weight, eps)
    total = x + update
    return F.rms_norm(total, weight.shape, weight, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. gate_up: [num_tokens, 2 * size], a row's gate before its up. Returns [num_tokens, size]."""
    if gate_up.is_cuda:
        from multilora_kernels import cuda

        return cuda.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
