"""`lora_expand`: the second half of a batched LoRA update, from the rank up to the output size, added in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multilora_kernels.dispatch import operator
from multilora_kernels.segments import LoRASegments
from multilora_kernels.tables import LoRATables


def lora_expand(
    v: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
) -> None:
    """y[t, slice s] += v[:, s, t, :r].sum(0) @ B(l(t), first_slice + s)^T in place, accumulated in float32.

    Where the adapter's row has a DoRA magnitude m: y[t, slice s] = m * (y[t, slice s] + v B^T). Base tokens and slices
    of rank 0 are not touched. y: [num_tokens, sum(slice_sizes)], the slices side by side; v: from `lora_shrink`.
    """
    operator("lora_expand", y)(v, y, tables, first_slice, slice_sizes, segments)
