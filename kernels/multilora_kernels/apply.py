"""`lora_apply`: a whole batched LoRA update of one fused linear."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multilora_kernels.dispatch import operator
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
    """y[t, slice s] += x[t] @ A(l(t), first_slice + s)^T @ B(l(t), first_slice + s)^T in place.

    `lora_shrink` then `lora_expand`, with the same arguments and results. One call saves most of a small batch's time
    on a CPU.
    """
    operator("lora_apply", x)(x, y, tables, first_slice, slice_sizes, segments)
