"""`lora_apply`: a whole batched LoRA update of one fused linear; `updated` and `activated`: with the base's product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from multilora_kernels.dispatch import operator
from multilora_kernels.expand import lora_expand, lora_expand_activated
from multilora_kernels.interpreter import has_gpu_operators
from multilora_kernels.segments import LoRASegments
from multilora_kernels.shrink import lora_shrink
from multilora_kernels.streams import beside
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


def updated(
    product: Callable[[], torch.Tensor],
    x: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The base's product of x, `lora_apply` on it, then the bias. Returns the product's memory.

    In a captured graph of a GPU the first half of the update runs beside the product, which reads x, too.
    """
    if has_gpu_operators(x.device):
        v, y = beside(partial(lora_shrink, x, tables, first_slice, len(slice_sizes), segments), product, x.device)
        lora_expand(v, y, tables, first_slice, slice_sizes, segments)
    else:
        y = product()
        lora_apply(x, y, tables, first_slice, slice_sizes, segments)
    return y if bias is None else y.add_(bias)


def activated(
    product: Callable[[], torch.Tensor],
    x: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    size: int,
    segments: LoRASegments,
    activation: str,
) -> torch.Tensor:
    """activation(gate) * up of gate and up, side by side, as `updated` has them; see `lora_expand_activated`."""
    v, gate_up = beside(partial(lora_shrink, x, tables, first_slice, 2, segments), product, x.device)
    return lora_expand_activated(v, gate_up, tables, first_slice, size, segments, activation)
