"""The places where adapters may change a model: its sites, and the wire modules that address them.

A model describes itself by `ModelSites`. Wire checks, pages, tables, sizes, converter and client read this description
and know no model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from multilora_wire.module_names import (
    ATTN_DENSE,
    ATTN_K,
    ATTN_Q,
    ATTN_QKV,
    ATTN_V,
    CROSS_K,
    CROSS_Q,
    CROSS_QKV,
    CROSS_V,
    FUSED_NAMES,
    MLP_4H_TO_H,
    MLP_GATE,
    MLP_GATE_UP,
    MLP_H_TO_4H,
    MOE_4H_TO_H,
    MOE_GATE,
    MOE_H_TO_4H,
    MOE_ROUTER,
    SHARED_4H_TO_H,
    SHARED_EXPERT_GATE,
    SHARED_H_TO_4H,
    SHARED_UP,
    UPSTREAM_NAMES,
)

OUTER_LAYER = -1
"""The layer of the parts that belong to no layer: the embeddings and the head."""

HEAD_LORA, EMBEDDING_LORA = -1, -2
EMBEDDING_ROWS, HEAD_ROWS, TIED_ROWS = -3, -4, -5
"""Module ids of these parts. They are negative, so that no row of `lora_config` can name them. Rows of tokens replace
rows of the embeddings, of the head, or of both where both are one matrix."""

FIRST_OWN_MODULE = -6
"""Module ids from here downwards are those of linears that the wire has no id for, such as fused ones of a model's own.
Files name these linears, and no row of `lora_config` can."""

LAYERS = "model.layers"
"""The list of layers of most models."""

ROW_MODULES = frozenset({EMBEDDING_ROWS, HEAD_ROWS, TIED_ROWS})
"""Module ids of rows of tokens."""

ModuleKind = Literal["linear", "embedding", "rows"]


@dataclass(frozen=True)
class ExpertsForm:
    """How the code of a model in transformers holds the experts of a layer; files of adapters on experts follow it.

    is_interleaved: rows of gate and up alternate in `gate_up_proj`; otherwise all rows of gate come first.
    is_transposed: `gate_up_proj` and `down_proj` are `[experts, in, out]`, not `[experts, out, in]`.
    """

    is_interleaved: bool = False
    is_transposed: bool = False


PLAIN_EXPERTS = ExpertsForm()
GPT_OSS_EXPERTS = ExpertsForm(is_interleaved=True, is_transposed=True)


@dataclass(frozen=True)
class LayerStack:
    """A list of layers. A decoder has one; an encoder-decoder model has the decoder's and then the encoder's.

    name: of the list, in the names of the model and of PEFT's tensors. first: the number of its first layer in
        `lora_config` and in names of sites.
    """

    name: str
    first: int = 0


@dataclass(frozen=True)
class AdapterSite:
    """A linear of the model that adapters may change: y = x W^T becomes y = x W^T + x A^T B^T.

    name: Hugging Face's module name without prefix, such as `layers.3.self_attn.q_proj`.
    experts: linears of this shape that lie side by side, one an expert; 1 for a linear that no router chooses.
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
    experts: A and B are those of so many experts, one after another. A row of `lora_weights` has all A
        `[experts, rank, in_size]`, then all B `[experts, out_size, rank]`.
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
    experts: int = 1


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
    left_out: modules and parts outside the layers that the model has, and that adapters may not change: see
        `restricted_to`.
    experts_form: how transformers holds the experts, where the model has any.
    stacks: the lists of layers, by ascending numbers of their layers.
    has_dora: whether the checkpoint has weights as DoRA reads them, and none transposed.
    """

    sites: tuple[AdapterSite, ...]
    modules: tuple[WireModule, ...]
    outer: OuterSites | None = None
    left_out: tuple[WireModule, ...] = ()
    experts_form: ExpertsForm = PLAIN_EXPERTS
    stacks: tuple[LayerStack, ...] = (LayerStack(LAYERS),)
    has_dora: bool = True

    def restricted_to(self, names: Collection[str]) -> ModelSites:
        """The same linears, with the modules alone that change linears of the modules `names`, and no others.

        names: of `target_names`. Raises KeyError for another name.
        """
        columns_of: dict[str, set[int]] = {name: set() for name in self.target_names}
        for module in (*self.modules, *self.outer_modules):
            columns_of.setdefault(module.name, set()).update(part.column for part in module.parts)
        enabled = set().union(*(columns_of[name] for name in names))
        kept, left_out = list[WireModule](), list(self.left_out)
        for module in (*self.modules, *self.outer_modules):
            columns = {part.column for part in module.parts}
            is_kept = columns <= enabled if columns else bool(enabled & self._columns_of_rows(module))
            (kept if is_kept else left_out).append(module)
        return replace(self, modules=tuple(m for m in kept if m.layer != OUTER_LAYER), left_out=tuple(left_out))

    def _columns_of_rows(self, module: WireModule) -> set[int]:
        """The columns of the matrix whose rows a module of rows of tokens replaces."""
        assert self.outer is not None
        embeddings, head = self.outer.embeddings.column, self.outer.head.column
        return {EMBEDDING_ROWS: {embeddings}, HEAD_ROWS: {head}}.get(module.module_id, {embeddings, head})

    @cached_property
    def target_names(self) -> tuple[str, ...]:
        """Upstream's names of the modules of the layers, then `lm_head` and `embed_tokens`."""
        outer = (module.name for module in self.outer_modules if module.parts)
        return tuple(dict.fromkeys([*self.module_names.values(), *outer]))

    @cached_property
    def left_out_at(self) -> dict[tuple[int, int], WireModule]:
        """Of `left_out`, by (layer, module id)."""
        return {(module.layer, module.module_id): module for module in self.left_out}

    def full_name(self, name: str) -> str:
        """The name in the whole model, and in PEFT's files, of a linear or a layer that is named `layers.N` here."""
        _, layer, *path = name.split(".", 2)
        stack = self.stack_of(int(layer))
        return ".".join([stack.name, str(int(layer) - stack.first), *path])

    def full_name_of(self, module: WireModule) -> str | None:
        """The name in the whole model of a module of one linear; None for a fused one."""
        return None if len(module.parts) != 1 else self.full_name(self._name_of(module))

    def stack_of(self, layer: int) -> LayerStack:
        """The list that has a layer; the last list for a number that no layer has."""
        return next(stack for stack in reversed(self.stacks) if stack.first <= layer)

    def layers_in(self, stack: LayerStack) -> int:
        """How many layers a list has."""
        ends = [*(stack.first for stack in self.stacks[1:]), self.num_layers]
        return ends[self.stacks.index(stack)] - stack.first

    @property
    def has_encoder(self) -> bool:
        """Whether the model has an encoder, whose layers come after the decoder's."""
        return len(self.stacks) > 1

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
        if self.outer is None:
            return ()
        return tuple(module for module in self.outer.modules if module not in self.left_out)

    @cached_property
    def num_layers(self) -> int:
        """Layers that rows of `lora_config` may name: 0 to `num_layers` - 1."""
        return max(site.layer for site in self.sites) + 1

    @cached_property
    def module_at(self) -> dict[tuple[int, int], WireModule]:
        """A wire module, or a part that `lora_config` cannot name, by (layer, module id)."""
        return {(module.layer, module.module_id): module for module in (*self.modules, *self.outer_modules)}

    @cached_property
    def module_named(self) -> dict[str, WireModule]:
        """A wire module by Hugging Face's name of its linear, such as `layers.3.mlp.gate_up_proj` for a fused one; also
        one that is left out. The fused modules of an encoder-decoder model have no such name.
        """
        left_out = (module for module in self.left_out if module.layer != OUTER_LAYER)
        modules = [module for module in (*self.modules, *left_out) if len(module.parts) == 1 or not self.has_encoder]
        return {self._name_of(module): module for module in modules}

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

PLAIN_MLP = ("c_fc", "c_proj")
"""Hugging Face's names in an MLP of two linears, as StarCoder 2's."""


@dataclass(frozen=True)
class SiteShape:
    """A linear of one layer, or one linear of each of its experts, before it has a column.

    path: within the layer, such as `self_attn.q_proj`. module_id: its wire module; from `FIRST_OWN_MODULE` downwards
        for a linear that the wire has no id for, one number for each path.
    """

    path: str
    module_id: int
    in_size: int
    out_size: int
    experts: int = 1


def attention_shapes(hidden_size: int, q_size: int, kv_size: int) -> list[SiteShape]:
    """The linears of attention, in the order of their columns."""
    return [
        SiteShape("self_attn.q_proj", ATTN_Q, hidden_size, q_size),
        SiteShape("self_attn.k_proj", ATTN_K, hidden_size, kv_size),
        SiteShape("self_attn.v_proj", ATTN_V, hidden_size, kv_size),
        SiteShape("self_attn.o_proj", ATTN_DENSE, q_size, hidden_size),
    ]


def mlp_shapes(hidden_size: int, intermediate_size: int, linears: Sequence[str] = GATED_MLP) -> list[SiteShape]:
    """The linears of an MLP, in the order of their columns.

    linears: Hugging Face's names of gate, up and down; of a plain MLP, those of its first and second linear.
    """
    *inner, outer = linears
    inner_ids = (MLP_H_TO_4H, MLP_GATE)
    return [
        *(SiteShape(f"mlp.{n}", i, hidden_size, intermediate_size) for n, i in zip(inner, inner_ids, strict=False)),
        SiteShape(f"mlp.{outer}", MLP_4H_TO_H, intermediate_size, hidden_size),
    ]


def expert_shapes(hidden_size: int, expert_size: int, num_experts: int) -> list[SiteShape]:
    """The router and the experts' gate, up and down of a sparse MLP, in the order of their columns."""
    return [
        SiteShape("mlp.gate", MOE_ROUTER, hidden_size, num_experts),
        SiteShape("mlp.experts.gate_proj", MOE_H_TO_4H, hidden_size, expert_size, num_experts),
        SiteShape("mlp.experts.up_proj", MOE_GATE, hidden_size, expert_size, num_experts),
        SiteShape("mlp.experts.down_proj", MOE_4H_TO_H, expert_size, hidden_size, num_experts),
    ]


def shared_expert_shapes(hidden_size: int, shared_size: int) -> list[SiteShape]:
    """The expert that all tokens use and the gate of its output, as in Qwen 2's mixtures, in the order of columns."""
    return [
        SiteShape("mlp.shared_expert.gate_proj", SHARED_H_TO_4H, hidden_size, shared_size),
        SiteShape("mlp.shared_expert.up_proj", SHARED_UP, hidden_size, shared_size),
        SiteShape("mlp.shared_expert.down_proj", SHARED_4H_TO_H, shared_size, hidden_size),
        SiteShape("mlp.shared_expert_gate", SHARED_EXPERT_GATE, hidden_size, 1),
    ]


def model_sites(
    layers: Iterable[Sequence[SiteShape]],
    hidden_size: int,
    vocab_size: int = 0,
    is_tied: bool = False,
    experts_form: ExpertsForm = PLAIN_EXPERTS,
    stacks: Sequence[LayerStack] = (LayerStack(LAYERS),),
    has_dora: bool = True,
) -> ModelSites:
    """Sites of a model by the linears of each layer, which may differ.

    layers: of each the shapes by `attention_shapes`, and by `mlp_shapes` or by `expert_shapes`, beside which
        `shared_expert_shapes` may stand.
    vocab_size: 0 for a model whose embeddings and head adapters may not change. is_tied: both are one matrix.
    experts_form: how transformers holds the experts.
    stacks, has_dora: see `ModelSites`.
    """
    sites: list[AdapterSite] = []
    modules: list[WireModule] = []
    column = 0
    for layer, shapes in enumerate(layers):
        site_of: dict[int, AdapterSite] = {}
        for shape in shapes:
            name = f"layers.{layer}.{shape.path}"
            site_of[shape.module_id] = AdapterSite(name, layer, shape.in_size, shape.out_size, column, shape.experts)
            column += shape.experts
        sites += site_of.values()
        modules += _wire_modules(site_of)
    outer = _outer_sites(column, vocab_size, hidden_size, is_tied)
    return ModelSites(
        tuple(sites),
        tuple(modules),
        outer,
        experts_form=experts_form,
        stacks=tuple(stacks),
        has_dora=has_dora,
    )


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
    """Sites of a decoder whose layers are all alike: attention with q, k, v and o, and an MLP (`mlp_shapes`)."""
    layer = [
        *attention_shapes(hidden_size, q_size, kv_size),
        *mlp_shapes(hidden_size, intermediate_size, mlp_linears),
    ]
    return model_sites([layer] * num_layers, hidden_size, vocab_size, is_tied)


def _outer_sites(first_column: int, vocab_size: int, hidden_size: int, is_tied: bool) -> OuterSites | None:
    if not vocab_size:
        return None
    embeddings = AdapterSite("embed_tokens", OUTER_LAYER, vocab_size, hidden_size, first_column)
    head = AdapterSite("lm_head", OUTER_LAYER, hidden_size, vocab_size, first_column + 1)
    return OuterSites(embeddings, head, is_tied)


_FUSED = {
    ATTN_QKV: (ATTN_Q, ATTN_K, ATTN_V),
    CROSS_QKV: (CROSS_Q, CROSS_K, CROSS_V),
    MLP_GATE_UP: (MLP_GATE, MLP_H_TO_4H),
}
"""The modules whose B has the rows of several others. `mlp_gate_up` has up first, then gate."""


def _wire_modules(site_of: Mapping[int, AdapterSite]) -> Iterator[WireModule]:
    """The wire modules of one layer, by ascending module id. site_of: the sites by the ids of their own modules."""
    parts_of = {module_id: (module_id,) for module_id in site_of} | {
        fused: parts for fused, parts in _FUSED.items() if site_of.keys() >= set(parts)
    }
    for module_id, parts in sorted(parts_of.items()):
        yield _wire_module(module_id, *(site_of[part] for part in parts))


def _wire_module(module_id: int, *sites: AdapterSite) -> WireModule:
    """The module whose B has the rows of `sites`, one site after another."""
    starts = [sum(site.out_size for site in sites[:index]) for index in range(len(sites))]
    parts = tuple(SitePart(site.column, start) for site, start in zip(sites, starts, strict=True))
    first, out_size = sites[0], sum(site.out_size for site in sites)
    name = UPSTREAM_NAMES.get(module_id) or first.name.removeprefix(f"layers.{first.layer}.")
    return WireModule(module_id, name, first.layer, first.in_size, out_size, parts, experts=first.experts)
