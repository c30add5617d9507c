"""`lora_expand`: the second half of a batched LoRA update, from the rank up to the output size, added in place; and
`lora_expand_activated`, the same of gate and up, with their activation.
"""

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


def lora_expand_activated(
    v: torch.Tensor,
    gate_up: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    size: int,
    segments: LoRASegments,
    activation: str,
) -> torch.Tensor:
    """activation(gate) * up of what `lora_expand` would make of gate_up, which stays as it is or gets the update.

    gate_up: [num_tokens, 2 * size], a row's gate before its up. activation: silu or gelu_tanh, for
    the bits of `silu_mul` or `gelu_tanh_mul` after `lora_expand`. The rest as of `lora_expand`; the permutation has the
    base tokens after those of adapters. Returns [num_tokens, size].
    """
    compute = operator("lora_expand_activated", gate_up)
    return compute(v, gate_up, tables, first_slice, size, segments, activation)  # type: ignore[no-any-return]
