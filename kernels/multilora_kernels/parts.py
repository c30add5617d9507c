"""The shape of the GPU's `lora_shrink`. It is not beside the kernel because shapes are needed without Triton."""

from __future__ import annotations

import torch

PART_SIZE = 1024
"""Hidden elements of one part of the sum. Changing it changes results in the last bit."""

MAX_SPLIT_TOKENS = 16384
"""Batches with more tokens fill a GPU with whole sums: 256 chunks of 64 tokens are nearly two programs for each
multiprocessor of an H100."""

_ALIGNMENT = 16
"""The unit of distances between rows, in elements. Triton compiles a kernel anew for distances that are no multiple."""


def num_parts(in_features: int, num_tokens: int) -> int:
    """First dimension of v on a GPU: one partial sum per part while batches are too small to fill the GPU, else one.

    A batch's bits do not depend on it: the parts are added in the same order, by `lora_expand` or before.
    """
    return -(-in_features // PART_SIZE) if num_tokens <= MAX_SPLIT_TOKENS else 1


def empty_v(x: torch.Tensor, num_slices: int, max_rank: int) -> torch.Tensor:
    """The memory of `lora_shrink`'s result, float32 [parts, num_slices, num_tokens, max_rank]; x: its tokens.

    Rows lie apart by a multiple of sixteen numbers, so that no kernel is compiled anew for another number of tokens.
    """
    num_tokens, in_features = x.shape
    width = -(-max_rank // _ALIGNMENT) * _ALIGNMENT
    parts = num_parts(in_features, num_tokens)
    return x.new_empty(parts, num_slices, num_tokens, width, dtype=torch.float32)[..., :max_rank]
