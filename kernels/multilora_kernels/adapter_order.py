"""`order_codes`: the codes of an adapter's B in the order of a GPU's kernels, once where the adapter enters a GPU.

A program of a GPU sums over the ranks of an output. In the order of `adapter_codes`, 16 outputs side by side, a thread
would fetch single bytes, or take part in sums of 16 outputs. In this order it fetches 16 ranks of an output at once, or
16 of two in 4 bits. A panel keeps its place and its scales, so the tables stay, too.
"""

from __future__ import annotations

import torch

from multilora_kernels.adapter_codes import CODE_BITS
from multilora_kernels.dispatch import gpu_operator
from multilora_kernels.interpreter import has_gpu_operators


def has_own_order(arena: torch.Tensor) -> bool:
    """Whether the operators that compute on this arena take B in the order that `order_codes` makes."""
    return arena.dtype in CODE_BITS and has_gpu_operators(arena.device)


def order_codes(
    arena: torch.Tensor, ranks: torch.Tensor, b_offsets: torch.Tensor, out_features: torch.Tensor, max_rank: int
) -> None:
    """Bring Bs of an arena on a GPU to the order of its kernels, in place. Each is brought once.

    ranks, b_offsets, out_features: [n] int64, of each B. max_rank: no rank is larger.
    """
    gpu_operator("order_codes")(arena, ranks, b_offsets, out_features, max_rank)
