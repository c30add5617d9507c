"""`LoRALinear`: a linear of the model with each token's adapter on top."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch

from multilora_engine.batch.forward_batch import LoRABatch
from multilora_engine.models.model_config import Activation
from multilora_engine.models.weights import Destination, LinearWeight, StoredPart, VectorPlace
from multilora_kernels import PackedLayerLinear, activated
from multilora_wire.sites import AdapterSite


class LoRALinear:
    """y = x W^T, plus each token's adapter, plus bias; W stacks the outputs of `sites` (q, k, v; gate, up).

    bias: [sum of the sites' out_size] or None. It comes last, because a DoRA magnitude scales only the weights.
    """

    def __init__(self, sites: Sequence[AdapterSite], weight: LinearWeight, bias: torch.Tensor | None) -> None:
        self.slice_sizes = tuple(site.out_size for site in sites)
        self.first_column = sites[0].column
        assert [site.column for site in sites] == list(range(self.first_column, self.first_column + len(sites)))
        self.weight = weight
        self.bias = bias

    def forward(self, x: torch.Tensor, lora: LoRABatch | None) -> torch.Tensor:
        """x: [num_tokens, in_features]. Returns [num_tokens, sum(slice_sizes)], the slices side by side."""
        if lora is None:
            return self.weight.product(x, self.bias)
        return self.weight.product_with_adapters(x, self.bias, self.first_column, self.slice_sizes, lora)

    def forward_activated(self, x: torch.Tensor, lora: LoRABatch, activation: Activation) -> torch.Tensor:
        """activation(gate) * up, where the slices are these two and there is no bias; on a GPU."""
        size, _ = self.slice_sizes
        assert self.bias is None
        product = partial(self.weight.product, x, None)
        return activated(product, x, lora.tables, self.first_column, size, lora.segments, activation)

    def packed(self) -> PackedLayerLinear | None:
        """The linear for a whole layer in one call, where its format has one."""
        weight = self.weight.packed()
        if weight is None:
            return None
        return PackedLayerLinear.of(weight, self.bias, self.first_column, self.slice_sizes)


def stored_parts(sites: Sequence[AdapterSite], names: Sequence[str]) -> list[StoredPart]:
    """The linears that a checkpoint has of `sites`. names: one for each site, or one for all of them."""
    sizes = [site.out_size for site in sites]
    sizes = sizes if len(names) == len(sizes) else [sum(sizes)]
    starts = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    return [StoredPart(*part) for part in zip(names, starts, sizes, strict=True)]


def bias_places(bias: torch.Tensor, parts: Sequence[StoredPart]) -> dict[str, Destination]:
    """The places of the biases of `parts`, by the checkpoint's names. bias: of them all."""
    return {f"{part.name}.bias": VectorPlace(bias[part.first : part.first + part.count]) for part in parts}
