"""The places where adapters may change a model: its sites, and the wire modules that address them.

A model describes itself by `ModelSites`. Wire checks, pages, tables, sizes, converter and client read this description
and know no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from multilora_wire.module_names import (
    ATTN_DENSE,
    ATTN_K,
    ATTN_Q,
    ATTN_QKV,
    ATTN_V,
    FUSED_NAMES,
    MLP_4H_TO_H,
    MLP_GATE,
    MLP_GATE_UP,
    MLP_H_TO_4H,
    UPSTREAM_NAMES,
)


@dataclass(frozen=True)
class AdapterSite:
    """A linear of the model that adapters may change: y = x W^T becomes y = x W^T + x A^T B^T.

    name: Hugging Face's module name without prefix, such as `layers.3.self_attn.q_proj`.
    column: of `LoRATables`, the first of `experts` consecutive ones.
    """

    name: str
    layer: int
    in_size: int
    out_size: int
    column: int
    experts: int = 1


@dataclass(frozen=True)
class SitePart:
    """The rows of a wire module's B from `start` on are those of the site with this column."""

    column: int
    start: int


@dataclass(frozen=True)
class WireModule:
    """One module id of one layer, as rows of `lora_config` name it; with A `[rank, in_size]` and B `[out_size, rank]`.

    name: upstream's, such as `attn_q`.
    """

    module_id: int
    name: str
    layer: int
    in_size: int
    out_size: int
    parts: tuple[SitePart, ...]


@dataclass(frozen=True)
class ModelSites:
    """All sites by ascending column, and all wire modules by (layer, module id)."""

    sites: tuple[AdapterSite, ...]
    modules: tuple[WireModule, ...]

    @cached_property
    def site_named(self) -> dict[str, AdapterSite]:
        """A site by its name."""
        return {site.name: site for site in self.sites}

    @cached_property
    def num_columns(self) -> int:
        """Columns of `LoRATables`."""
        return max(site.column + site.experts for site in self.sites)

    @cached_property
    def num_layers(self) -> int:
        """Layers that rows of `lora_config` may name: 0 to `num_layers` - 1."""
        return max(module.layer for module in self.modules) + 1

    @cached_property
    def module_at(self) -> dict[tuple[int, int], WireModule]:
        """A wire module by (layer, module id)."""
        return {(module.layer, module.module_id): module for module in self.modules}

    @cached_property
    def module_named(self) -> dict[str, WireModule]:
        """A wire module by Hugging Face's name of its linear, such as `layers.3.mlp.gate_up_proj` for a fused one."""
        return {self._name_of(module): module for module in self.modules}

    def _name_of(self, module: WireModule) -> str:
        if len(module.parts) == 1:
            return self.site_at[module.parts[0].column].name
        return f"layers.{module.layer}.{FUSED_NAMES[module.module_id]}"

    @cached_property
    def site_at(self) -> dict[int, AdapterSite]:
        """A site by its column."""
        return {site.column: site for site in self.sites}

    @cached_property
    def module_names(self) -> dict[int, str]:
        """Upstream's names of the module ids that the model has, by ascending id."""
        return dict(sorted({module.module_id: module.name for module in self.modules}.items()))

    @cached_property
    def module_ids(self) -> dict[str, int]:
        """The module ids that the model has, by upstream's names."""
        return {name: module_id for module_id, name in self.module_names.items()}

    @cached_property
    def plain_modules(self) -> tuple[WireModule, ...]:
        """The wire modules of one site each: one row for each site of the model."""
        return tuple(module for module in self.modules if len(module.parts) == 1)


GATED_MLP = ("gate_proj", "up_proj", "down_proj")
"""Hugging Face's names in an MLP that multiplies its activation with a second projection, as Llama's."""


def decoder_sites(
    num_layers: int,
    hidden_size: int,
    q_size: int,
    kv_size: int,
    intermediate_size: int,
    mlp_linears: Sequence[str] = GATED_MLP,
) -> ModelSites:
    """Sites of a decoder whose layers are all alike: attention with q, k, v and o, and an MLP.

    mlp_linears: Hugging Face's names of gate, up and down; of a plain MLP, those of its first and second linear.
    """
    sites: list[AdapterSite] = []
    modules: list[WireModule] = []
    for layer in range(num_layers):
        shapes = [
            *_attention_shapes(hidden_size, q_size, kv_size),
            *_mlp_shapes(hidden_size, intermediate_size, mlp_linears),
        ]
        first = len(sites)
        sites += [
            AdapterSite(f"layers.{layer}.{path}", layer, in_size, out_size, first + index)
            for index, (path, in_size, out_size) in enumerate(shapes)
        ]
        modules += _wire_modules(sites[first:], is_gated=len(mlp_linears) == len(GATED_MLP))
    return ModelSites(tuple(sites), tuple(modules))


def _attention_shapes(hidden: int, q: int, kv: int) -> list[tuple[str, int, int]]:
    """Path, in and out sizes of the attention's linears, in the order of their columns."""
    return [
        ("self_attn.q_proj", hidden, q),
        ("self_attn.k_proj", hidden, kv),
        ("self_attn.v_proj", hidden, kv),
        ("self_attn.o_proj", q, hidden),
    ]


def _mlp_shapes(hidden: int, intermediate: int, linears: Sequence[str]) -> list[tuple[str, int, int]]:
    """Path, in and out sizes of the MLP's linears, in the order of their columns."""
    *inner, outer = linears
    return [*((f"mlp.{name}", hidden, intermediate) for name in inner), (f"mlp.{outer}", intermediate, hidden)]


def _wire_modules(sites: Sequence[AdapterSite], is_gated: bool) -> Iterator[WireModule]:
    """The wire modules of one layer, by ascending module id.

    The fused `mlp_gate_up` has B's halves swapped: up first, then gate.
    """
    q, k, v, o, inner, *rest = sites
    yield _wire_module(ATTN_QKV, q, k, v)
    yield _wire_module(ATTN_Q, q)
    yield _wire_module(ATTN_K, k)
    yield _wire_module(ATTN_V, v)
    yield _wire_module(ATTN_DENSE, o)
    yield _wire_module(MLP_H_TO_4H, inner)
    yield _wire_module(MLP_4H_TO_H, rest[-1])
    if is_gated:
        yield _wire_module(MLP_GATE, rest[0])
        yield _wire_module(MLP_GATE_UP, rest[0], inner)


def _wire_module(module_id: int, *sites: AdapterSite) -> WireModule:
    """The module whose B has the rows of `sites` one behind another."""
    starts = [sum(site.out_size for site in sites[:index]) for index in range(len(sites))]
    parts = tuple(SitePart(site.column, start) for site, start in zip(sites, starts, strict=True))
    first, out_size = sites[0], sum(site.out_size for site in sites)
    return WireModule(module_id, UPSTREAM_NAMES[module_id], first.layer, first.in_size, out_size, parts)
