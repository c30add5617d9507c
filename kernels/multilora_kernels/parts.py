"""How the GPU kernels cut the long sum of `lora_shrink`; apart from them, since shapes are needed without Triton."""

from __future__ import annotations

from multilora_kernels.segments import CHUNK_SIZE

PART_SIZE = 1024
"""Hidden elements of one part of the sum. Changing it changes results in the last bit."""


def num_parts(in_features: int, chunk_size: int) -> int:
    """First dimension of v on a GPU: one partial sum per part while batches are too small to fill the GPU, else one."""
    return -(-in_features // PART_SIZE) if chunk_size <= CHUNK_SIZE else 1
