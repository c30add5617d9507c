"""`lora_apply` on a GPU.

A kernel that shrank and expanded in one launch took longer than two on an H200 in all shapes that were tried, a quarter
to one and a half times: its programs repeat the shrink, or wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multilora_kernels.cuda.expand import lora_expand
from multilora_kernels.cuda.shrink import lora_shrink
from multilora_kernels.segments import LoRASegments
from multilora_kernels.tables import LoRATables


def lora_apply(
    x: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
) -> None:
    """See `multilora_kernels.apply.lora_apply`."""
    v = lora_shrink(x, tables, first_slice, len(slice_sizes), segments)
    lora_expand(v, y, tables, first_slice, slice_sizes, segments)
