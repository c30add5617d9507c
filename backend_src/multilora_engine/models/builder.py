"""`Builder`: makes the pieces of a model that hold weights, and knows which tensors of a checkpoint fill them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from multilora_engine.models.linear import LoRALinear, bias_places, stored_parts
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.norms import LayerNorm, RMSNorm
from multilora_engine.models.weights import (
    Destination,
    ExpertStack,
    ExpertWeights,
    Placement,
    SplitPlace,
    StoredPart,
    StoredWeight,
    VectorPlace,
    WeightFormat,
    num_outputs,
)
from multilora_wire.sites import AdapterSite


@dataclass(frozen=True)
class Builder:
    """Makes pieces whose names in the checkpoint start with `prefix`, and whose sites' names start with `site_prefix`.

    sites: of the model, by name. tensors: the places of the checkpoint's tensors, by Hugging Face's names. weights: of
    linears. The last two grow with every piece that is made, under any prefix.
    """

    config: ModelConfig
    sites: Mapping[str, AdapterSite]
    format: WeightFormat
    prefix: str = "model."
    site_prefix: str = ""
    tensors: dict[str, Destination] = field(default_factory=dict)
    weights: list[StoredWeight] = field(default_factory=list)

    @property
    def placement(self) -> Placement:
        return self.format.placement

    def layer(self, index: int) -> Builder:
        """Makes the pieces of one layer."""
        name = f"layers.{index}"
        return replace(self, prefix=f"{self.config.sites.full_name(name)}.", site_prefix=f"{name}.")

    def under(self, prefix: str) -> Builder:
        """Makes pieces outside the layers, whose names in the checkpoint start with `prefix`."""
        return replace(self, prefix=prefix, site_prefix="")

    def has(self, path: str) -> bool:
        """Whether the model has a site at `path`."""
        return self._site_name(path) in self.sites

    def site(self, path: str) -> AdapterSite:
        return self.sites[self._site_name(path)]

    def stores(self, path: str) -> bool:
        """Whether the checkpoint has a tensor at `path`."""
        return self.format.stores(f"{self.prefix}{path}")

    def linear(self, paths: Sequence[str], has_bias: bool, stored_as: str = "") -> LoRALinear:
        """One linear for the sites at `paths`, whose outputs it stacks.

        stored_as: the path of the one linear that the checkpoint has in place of them all.
        """
        sites = [self.site(path) for path in paths]
        parts = stored_parts(sites, [self.prefix + path for path in ([stored_as] if stored_as else paths)])
        weight = self.format.linear(parts, sites[0].in_size)
        bias = self.placement.vectors(num_outputs(parts)) if has_bias else None
        self.tensors.update(weight.checkpoint_tensors())
        if bias is not None:
            self.tensors.update(bias_places(bias, parts))
        self.weights.append(weight)
        return LoRALinear(sites, weight, bias)

    def router(self, path: str, stored_as: str, has_bias: bool) -> LoRALinear:
        """The router of a mixture, which chooses among the outputs of the site at `path`."""
        site = self.site(path)
        part = StoredPart(self.prefix + stored_as, 0, site.out_size)
        weight = self.format.router(part, site.in_size)
        self.tensors.update(weight.checkpoint_tensors())
        self.weights.append(weight)
        bias = torch.empty(site.out_size, dtype=torch.float32, device=self.placement.device) if has_bias else None
        if bias is not None:
            self.tensors.update(bias_places(bias, [part]))
        return LoRALinear([site], weight, bias)

    def experts(self, paths: Sequence[str], stored_as: Sequence[str], stack: ExpertStack) -> ExpertWeights:
        """The weights of all experts at `paths`, whose outputs each expert stacks.

        stored_as: for each path the checkpoint's own, with `{}` in the place of the expert's number.
        stack: see `WeightFormat.experts`; its name is a path.
        """
        sites = [self.site(path) for path in paths]
        names = [[self.prefix + path.format(expert) for path in stored_as] for expert in range(sites[0].experts)]
        parts = [stored_parts(sites, of_expert) for of_expert in names]
        stack = replace(stack, name=self.prefix + stack.name)
        weights = self.format.experts(parts, sites[0].in_size, stack)
        self.tensors.update(weights.checkpoint_tensors())
        self.weights.append(weights)
        return weights

    def expert_biases(self, paths: Sequence[str], stack: ExpertStack) -> torch.Tensor:
        """The biases of all experts at `paths`, [experts, outputs], which the checkpoint has in one tensor."""
        sites = [self.site(path) for path in paths]
        parts = stored_parts(sites, paths)
        biases = self.placement.vectors(sites[0].experts, num_outputs(parts))
        places = [
            ((slice(None), rows), VectorPlace(biases[:, part.first : part.first + part.count]))
            for part, rows in zip(parts, stack.rows(parts), strict=True)
        ]
        self.tensors[f"{self.prefix}{stack.name}_bias"] = SplitPlace(biases.shape, places)
        return biases

    def vector(self, path: str, *shape: int) -> torch.Tensor:
        """Numbers that the checkpoint has under this very path."""
        values = self.placement.vectors(*shape)
        self.tensors[self.prefix + path] = VectorPlace(values)
        return values

    def rms_norm(self, path: str, size: int = 0, offset: float = 0.0) -> RMSNorm:
        """size: of the last dimension, 0 for the hidden size. offset: added to the checkpoint's weights."""
        weight = self.placement.vectors(size or self.config.hidden_size)
        self.tensors[f"{self.prefix}{path}.weight"] = VectorPlace(weight, offset)
        return RMSNorm(weight, self.config.norm_eps)

    def layer_norm(self, path: str, has_bias: bool) -> LayerNorm:
        """Over the hidden size."""
        weight, bias = self.placement.vectors(2, self.config.hidden_size).unbind()
        self.tensors[f"{self.prefix}{path}.weight"] = VectorPlace(weight)
        if has_bias:
            self.tensors[f"{self.prefix}{path}.bias"] = VectorPlace(bias)
        return LayerNorm(weight, bias if has_bias else None, self.config.norm_eps)

    def _site_name(self, path: str) -> str:
        return self.site_prefix + path
