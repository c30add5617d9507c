"""The cosines and sines of rotary position embeddings (arXiv 2104.09864)."""

from __future__ import annotations

import torch

from multilora_kernels.dispatch import compiled_for


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of positions[t] * frequencies[i], each float32 [num_tokens, 1, size].

    positions: int64 [num_tokens]; frequencies: float32 [size], on the same device. The product is one of float32.
    On a CPU it is one call, since four of PyTorch's take a step of a small model 0.1 ms; compiled kernels raise
    RuntimeError there for other shapes and dtypes.
    """
    library = compiled_for(positions)
    if library is not None:
        return library.rotary_angles(positions, frequencies)  # type: ignore[no-any-return]
    # An integer times a float32 is a product of float32, without a conversion before it.
    products = positions.view(-1, 1, 1) * frequencies
    return products.cos(), products.sin()
