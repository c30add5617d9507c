"""The pieces of a Llama layer that hold weights: linears with batched LoRA, and RMS normalisation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from multilora_engine.execution.forward_batch import LoRABatch
from multilora_kernels import HugePages, PackedLayerLinear, PackedWeight, lora_linear, packed_linear

SLICES_PER_LAYER = 7
"""LoRA slices of a layer, in this order: q, k, v, o, gate, up, down."""


@dataclass(frozen=True)
class Placement:
    """Where a model lies, and as what.

    dtype: of activations, norms and biases, and of all arithmetic. weight_dtype: that linears and embeddings are stored
    in; the two differ on a CPU only, which reads bytes slower than it multiplies.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    _pages: HugePages = field(default_factory=HugePages, init=False, repr=False, compare=False)

    def weight(self, out_features: int, in_features: int) -> PackedWeight:
        """Of a linear, uninitialised. On a CPU weights lie in memory in the order in which they are asked for."""
        return PackedWeight.empty(out_features, in_features, self.weight_dtype, self.device, self.dtype, self._pages)

    def embeddings(self, num_embeddings: int, size: int) -> PackedWeight:
        """Embeddings that are no head too, uninitialised: plain rows, which are quicker to look up than panels."""
        rows = torch.empty(num_embeddings, size, dtype=self.weight_dtype, device=self.device)
        return PackedWeight(rows, num_embeddings)

    def vectors(self, *shape: int) -> torch.Tensor:
        """Norms or biases, uninitialised."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Destination(Protocol):
    """Where a tensor of a checkpoint belongs: a tensor, or some rows of a packed weight."""

    @property
    def shape(self) -> torch.Size: ...

    def copy_(self, values: torch.Tensor, /) -> object: ...


@dataclass(frozen=True)
class WeightRows:
    """The rows first .. first + count of a packed weight."""

    weight: PackedWeight
    first: int
    count: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count, self.weight.shape[1]))

    def copy_(self, values: torch.Tensor, /) -> None:
        self.weight.copy_rows(self.first, values)

    def tensor(self) -> torch.Tensor:
        """A copy, as the checkpoint has it."""
        return self.weight.rows(self.first, self.count)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, with the mean in float32."""
    return F.rms_norm(x, weight.shape, weight, eps)


class LoRALinear:
    """y = x W^T, plus each token's adapter, plus bias; W stacks the outputs of `slice_sizes` (q, k, v; gate, up).

    weight: [sum(slice_sizes), in_features]; bias: [sum(slice_sizes)] or None. Slice s of this linear is the column
    `first_slice + s` of the adapter tables. The bias comes last, because a DoRA magnitude scales only the weights.
    """

    def __init__(
        self, in_features: int, slice_sizes: Sequence[int], first_slice: int, has_bias: bool, placement: Placement
    ) -> None:
        self.slice_sizes = tuple(slice_sizes)
        self.first_slice = first_slice
        self.weight = placement.weight(sum(slice_sizes), in_features)
        self.bias = placement.vectors(sum(slice_sizes)) if has_bias else None

    def forward(self, x: torch.Tensor, lora: LoRABatch | None) -> torch.Tensor:
        """x: [num_tokens, in_features]. Returns [num_tokens, sum(slice_sizes)], the slices side by side."""
        if lora is None:
            return packed_linear(x, self.weight, self.bias)
        tables, segments = lora.tables, lora.segments
        return lora_linear(x, self.weight, tables, self.first_slice, self.slice_sizes, segments, self.bias)

    def packed(self) -> PackedLayerLinear:
        """For a whole layer in one call; the weight must be packed."""
        return PackedLayerLinear.of(self.weight, self.bias, self.first_slice, self.slice_sizes)

    def checkpoint_tensors(self, *names: str) -> Mapping[str, Destination]:
        """Where the checkpoint's tensors of the slices belong, by name: in the fused weight and bias."""
        ends = itertools.accumulate(self.slice_sizes)
        rows = [WeightRows(self.weight, end - size, size) for end, size in zip(ends, self.slice_sizes, strict=True)]
        places: dict[str, Destination] = {f"{name}.weight": place for name, place in zip(names, rows, strict=True)}
        if self.bias is not None:
            places |= {f"{n}.bias": b for n, b in zip(names, self.bias.split_with_sizes(self.slice_sizes), strict=True)}
        return places
