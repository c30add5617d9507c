"""`lora_linear`: a base linear and its whole batched LoRA update."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from multilora_kernels.apply import updated
from multilora_kernels.cpu import compiled_kernels
from multilora_kernels.linear import PackedWeight, packed_linear
from multilora_kernels.segments import LoRASegments
from multilora_kernels.tables import LoRATables


def lora_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[t, slice s] = x[t] @ W_s^T + x[t] @ A(l(t), first_slice + s)^T @ B(l(t), first_slice + s)^T, then + bias.

    `packed_linear` then `lora_apply` then the bias, with their arguments and, bit for bit, their result. On packed
    weights it is one parallel region: a small batch on a CPU would spend more time in waking threads twice than in
    reading its adapters.

    The bias comes last, because a DoRA magnitude scales the weights only. Returns [num_tokens, sum(slice_sizes)].
    """
    if not weight.is_packed:
        return updated(partial(packed_linear, x, weight), x, tables, first_slice, slice_sizes, segments, bias)
    packed = (x, weight.data, tables, first_slice, slice_sizes, segments, bias)
    return compiled_kernels().lora_linear(*packed)  # type: ignore[no-any-return]
