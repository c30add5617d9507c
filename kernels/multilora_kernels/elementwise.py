"""What lies between a layer's matrix products: in one call each on a CPU (float32) and in one launch each on a GPU."""

from __future__ import annotations

import torch

from multilora_kernels import operators, reference
from multilora_kernels.cpu import add_rms_norm_directly, silu_mul_directly
from multilora_kernels.dispatch import load_operators


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
    if x.dtype != torch.float32:
        return reference.add_rms_norm(x, update, weight, eps)
    is_eager = not torch.compiler.is_compiling()
    if is_eager and (results := add_rms_norm_directly(x, update, weight, eps)) is not None:
        return results
    load_operators(x)
    return operators.add_rms_norm(x, update, weight, eps)  # type: ignore[no-any-return]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. gate_up: [num_tokens, 2 * size], a row's gate before its up. Returns [num_tokens, size]."""
    if gate_up.is_cuda:
        from multilora_kernels import cuda

        return cuda.silu_mul(gate_up)
    if gate_up.dtype != torch.float32:
        return reference.silu_mul(gate_up)
    if not torch.compiler.is_compiling() and (product := silu_mul_directly(gate_up)) is not None:
        return product
    load_operators(gate_up)
    return operators.silu_mul(gate_up)  # type: ignore[no-any-return]
