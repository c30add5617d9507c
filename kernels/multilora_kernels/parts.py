"""How the GPU kernels cut the long sum of `lora_shrink`; apart from them, since shapes are needed without Triton."""

from __future__ import annotations

PART_SIZE = 1024
"""Hidden elements of one part of the sum. Changing it changes results in the last bit."""


MAX_SPLIT_TOKENS = 4096
"""More fill a GPU with whole sums: 64 chunks of 64 tokens are more programs than most have processors."""


def num_parts(in_features: int, num_tokens: int) -> int:
    """First dimension of v on a GPU: one partial sum per part while batches are too small to fill the GPU, else one.

    A batch's bits do not depend on it: the parts are added in the same order, by `lora_expand` or before.
    """
    return -(-in_features // PART_SIZE) if num_tokens <= MAX_SPLIT_TOKENS else 1
