"""The places where adapters may change a model: its sites, and the wire modules that address them.

A model describes itself by `ModelSites`. Wire checks, pages, tables, sizes, converter and client read this description
and know no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

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

OUTER_LAYER = -1
"""The layer of the parts that belong to no layer: the embeddings and the head."""

HEAD_LORA, EMBEDDING_LORA = -1, -2
EMBEDDING_ROWS, HEAD_ROWS, TIED_ROWS = -3, -4, -5
"""Module ids of these parts. They are negative, so that no row of `lora_config` can name them. Rows of tokens replace
rows of the embeddings, of the head, or of both where both are one matrix."""

ROW_MODULES = frozenset({EMBEDDING_ROWS, HEAD_ROWS, TIED_ROWS})
"""Module ids of rows of tokens."""

ModuleKind = Literal["linear", "embedding", "rows"]


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
    kind: `linear`, or of `OuterSites` also `embedding`, whose A is stored as `[in_size, rank]`, and `rows`, which has
        in the place of A the ids of `rank` tokens, in the place of B their rows `[rank, out_size]`, and no columns.
    """

    module_id: int
    name: str
    layer: int
    in_size: int
    out_size: int
    parts: tuple[SitePart, ...]
    kind: ModuleKind = "linear"


@dataclass(frozen=True)
class OuterSites:
    """The embeddings and the head. No row of `lora_config` names them.

    embeddings: from the vocabulary to the hidden size. head: from the hidden size to the vocabulary.
    is_tied: both are one matrix.
    """

    embeddings: AdapterSite
    head: AdapterSite
    is_tied: bool

    @property
    def vocab_size(self) -> int:
        """Tokens of the model."""
        return self.embeddings.in_size

    @cached_property
    def modules(self) -> tuple[WireModule, ...]:
        """The parts of adapters that change these sites."""
        return (
            _outer_module(HEAD_LORA, "lm_head", self.head, "linear"),
            _outer_module(EMBEDDING_LORA, "embed_tokens", self.embeddings, "embedding"),
            _outer_module(EMBEDDING_ROWS, "embed_tokens rows", self.embeddings, "rows"),
            _outer_module(HEAD_ROWS, "lm_head rows", self.embeddings, "rows"),
            *([_outer_module(TIED_ROWS, "token rows", self.embeddings, "rows")] if self.is_tied else []),
        )


def _outer_module(module_id: int, name: str, site: AdapterSite, kind: ModuleKind) -> WireModule:
    parts = () if kind == "rows" else (SitePart(site.column, 0),)
    return WireModule(module_id, name, OUTER_LAYER, site.in_size, site.out_size, parts, kind)


@dataclass(frozen=True)
class ModelSites:
    """The linears of all layers by ascending column, and all wire modules by (layer, module id).

    outer: the embeddings and the head; None where they are not known, and adapters may not change them.
    """

    sites: tuple[AdapterSite, ...]
    modules: tuple[WireModule, ...]
    outer: OuterSites | None = None

    @cached_property
    def site_named(self) -> dict[str, AdapterSite]:
        """A linear of a layer by its name."""
        return {site.name: site for site in self.sites}

    @cached_property
    def num_columns(self) -> int:
        """Columns of `LoRATables`."""
        return max(site.column + site.experts for site in self.all_sites)

    @cached_property
    def all_sites(self) -> tuple[AdapterSite, ...]:
        """The linears, then the embeddings and the head."""
        return self.sites if self.outer is None else (*self.sites, self.outer.embeddings, self.outer.head)

    @cached_property
    def outer_modules(self) -> tuple[WireModule, ...]:
        """The parts of adapters that `lora_config` cannot name."""
        return () if self.outer is None else self.outer.modules

    @cached_property
    def num_layers(self) -> int:
        """Layers that rows of `lora_config` may name: 0 to `num_layers` - 1."""
        return max(module.layer for module in self.modules) + 1

    @cached_property
    def module_at(self) -> dict[tuple[int, int], WireModule]:
        """A wire module, or a part that `lora_config` cannot name, by (layer, module id)."""
        return {(module.layer, module.module_id): module for module in (*self.modules, *self.outer_modules)}

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
        return {site.column: site for site in self.all_sites}

    @cached_property
    def module_names(self) -> dict[int, str]:
        """Upstream's names of the module ids that the model has, by ascending id."""
        return dict(sorted({module.module_id: module.name for module in self.modules}.items()))

    @cached_property
    def part_names(self) -> dict[int, str]:
        """`module_names`, and the names of the parts that `lora_config` cannot name, by ascending id."""
        outer = {module.module_id: module.name for module in self.outer_modules}
        return dict(sorted(outer.items())) | self.module_names

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
    vocab_size: int = 0,
    is_tied: bool = False,
) -> ModelSites:
    """Sites of a decoder whose layers are all alike: attention with q, k, v and o, and an MLP.

    mlp_linears: Hugging Face's names of gate, up and down; of a plain MLP, those of its first and second linear.
    vocab_size: 0 for a model whose embeddings and head adapters may not change. is_tied: both are one matrix.
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
    return ModelSites(tuple(sites), tuple(modules), _outer_sites(len(sites), vocab_size, hidden_size, is_tied))


def _outer_sites(first_column: int, vocab_size: int, hidden_size: int, is_tied: bool) -> OuterSites | None:
    if not vocab_size:
        return None
    embeddings = AdapterSite("embed_tokens", OUTER_LAYER, vocab_size, hidden_size, first_column)
    head = AdapterSite("lm_head", OUTER_LAYER, hidden_size, vocab_size, first_column + 1)
    return OuterSites(embeddings, head, is_tied)


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
    """The module whose B has the rows of `sites`, one site after another."""
    starts = [sum(site.out_size for site in sites[:index]) for index in range(len(sites))]
    parts = tuple(SitePart(site.column, start) for site, start in zip(sites, starts, strict=True))
    first, out_size = sites[0], sum(site.out_size for site in sites)
    return WireModule(module_id, UPSTREAM_NAMES[module_id], first.layer, first.in_size, out_size, parts)
