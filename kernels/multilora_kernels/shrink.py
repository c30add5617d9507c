"""`lora_shrink`: the first half of a batched LoRA update, from the hidden size down to the rank."""

from __future__ import annotations

import torch

from multilora_kernels.dispatch import operator
from multilora_kernels.segments import LoRASegments
from multilora_kernels.tables import LoRATables


def lora_shrink(
    x: torch.Tensor, tables: LoRATables, first_slice: int, num_slices: int, segments: LoRASegments
) -> torch.Tensor:
    """v[:, s, t, :r].sum(0) = x[t] @ A(l(t), first_slice + s)^T, accumulated in float32.

    l(t) is the adapter of token t and r its rank in that slice. Rows of base tokens and of rank 0, and columns from r
    up, are undefined: `lora_expand` never reads them.

    x: [num_tokens, in], float32, bfloat16 or float16. Slices first_slice .. first_slice + num_slices - 1 of one fused
    linear share it. Returns v: [num_parts, num_slices, num_tokens, max_rank], float32; `lora_expand` adds the parts, of
    which the CPU has one and a GPU as many as fill it.
    """
    return operator("lora_shrink", x)(x, tables, first_slice, num_slices, segments)  # type: ignore[no-any-return]
