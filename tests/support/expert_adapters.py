"""Adapters on the experts of a small mixture: random factors, and the files that trainers make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from multilora_wire.module_names import MOE_4H_TO_H, MOE_GATE, MOE_H_TO_4H
from multilora_wire.peft_files import LinearReader, PeftAdapter, PeftLinear
from multilora_wire.sites import (
    GPT_OSS_EXPERTS,
    PLAIN_EXPERTS,
    ExpertsForm,
    ModelSites,
    attention_shapes,
    expert_shapes,
    mlp_shapes,
    model_sites,
    shared_expert_shapes,
)

Array = npt.NDArray[np.float32]
Pair = tuple[Array, Array]
Factors = Mapping[tuple[int, int, int], Pair]
"""A `[rank, in]` and B `[out, rank]` by layer, module id and expert."""

GATE, UP, DOWN = MOE_H_TO_4H, MOE_GATE, MOE_4H_TO_H
PREFIX = "base_model.model.model.layers"


def mixture_sites(
    hidden_size: int = 20,
    expert_size: int = 12,
    num_experts: int = 4,
    form: ExpertsForm = PLAIN_EXPERTS,
    num_layers: int = 3,
) -> ModelSites:
    """Layer 0 is dense, the others have experts and a shared one. By default all sizes differ."""
    attention = attention_shapes(hidden_size, 36, 18)
    sparse = [
        *attention,
        *expert_shapes(hidden_size, expert_size, num_experts),
        *shared_expert_shapes(hidden_size, 28),
    ]
    return model_sites(
        [[*attention, *mlp_shapes(hidden_size, 44)], *[sparse] * (num_layers - 1)], hidden_size, 0, experts_form=form
    )


PLAIN = mixture_sites()
GPT_OSS = mixture_sites(form=GPT_OSS_EXPERTS)


def random_factors(
    sites: ModelSites,
    rank: int = 3,
    layers: Iterable[int] = (1, 2),
    modules: Iterable[int] = (GATE, UP, DOWN),
    seed: int = 0,
    has_shared_sides: bool = False,
) -> dict[tuple[int, int, int], Pair]:
    """Factors of all experts; gate and up have the same A.

    has_shared_sides: all A of gate and up are equal, and all B of down.
    """
    generator = np.random.default_rng(seed)
    factors: dict[tuple[int, int, int], Pair] = {}
    for layer in layers:
        for module_id in modules:
            module = sites.module_at[layer, module_id]
            for expert in range(module.experts):
                a = generator.standard_normal((rank, module.in_size), np.float32).astype(np.float16)
                b = generator.standard_normal((module.out_size, rank), np.float32).astype(np.float16)
                if module_id == UP and (layer, GATE, expert) in factors:
                    a = factors[layer, GATE, expert][0]
                if has_shared_sides and expert:
                    a = a if module_id == DOWN else factors[layer, module_id, 0][0]
                    b = factors[layer, DOWN, 0][1] if module_id == DOWN else b
                factors[layer, module_id, expert] = (a.astype(np.float32), b.astype(np.float32))
    return factors


@dataclass(frozen=True)
class FusedFactors:
    """All A `[experts, rank, in]` and all B `[experts, out, rank]` by layer and name of the model's parameter."""

    stacks: Mapping[tuple[int, str], Pair]

    @classmethod
    def of(cls, factors: Factors, form: ExpertsForm) -> FusedFactors:
        """Rows of gate and up lie as in the model's parameter."""
        stacks: dict[tuple[int, str], Pair] = {}
        for layer in sorted({layer for layer, _, _ in factors}):
            a_of, b_of = ({m: stacked(factors, layer, m, side) for m in (GATE, UP, DOWN)} for side in (0, 1))
            if b_of[GATE].size:
                halves = np.stack([b_of[GATE], b_of[UP]], axis=2 if form.is_interleaved else 1)
                experts, rows, rank = b_of[GATE].shape
                stacks[layer, "gate_up_proj"] = (a_of[GATE], halves.reshape(experts, 2 * rows, rank))
            if b_of[DOWN].size:
                stacks[layer, "down_proj"] = (a_of[DOWN], b_of[DOWN])
        return cls(stacks)


def stacked(factors: Factors, layer: int, module_id: int, side: int) -> Array:
    """A (side 0) or B (side 1) of all experts; empty where the adapter has none."""
    found = [pair[side] for (at, module, _), pair in sorted(factors.items()) if (at, module) == (layer, module_id)]
    return np.stack(found) if found else np.empty((0, 0, 0), np.float32)


def _named(path: str, pair: Pair) -> dict[str, Array]:
    a, b = pair
    return {f"{PREFIX}.{path}.lora_A.weight": a, f"{PREFIX}.{path}.lora_B.weight": b}


def numbered(
    factors: Factors, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), mlp: str = "mlp"
) -> dict[str, Array]:
    """One expert a tensor. names: of gate, up and down."""
    name = dict(zip((GATE, UP, DOWN), names, strict=True))
    tensors: dict[str, Array] = {}
    for (layer, module_id, expert), pair in factors.items():
        tensors |= _named(f"{layer}.{mlp}.experts.{expert}.{name[module_id]}", pair)
    return tensors


def mixtral(factors: Factors) -> dict[str, Array]:
    """Mixtral's names."""
    return numbered(factors, ("w1", "w3", "w2"), "block_sparse_moe")


def numbered_fused(factors: Factors, form: ExpertsForm, unsloth: bool = False) -> dict[str, Array]:
    """One expert a tensor, gate and up in one. unsloth: under Unsloth's names."""
    tensors: dict[str, Array] = {}
    for (layer, name), (a, b) in FusedFactors.of(factors, form).stacks.items():
        for expert in range(len(a)):
            path = f"{name}s.{expert}" if unsloth else f"{expert}.{name}"
            tensors |= _named(f"{layer}.mlp.experts.{path}", (a[expert], b[expert]))
    return tensors


def wrapped(
    factors: Factors, form: ExpertsForm, is_exchanged: bool = False, has_dimensions: bool = False
) -> dict[str, Array]:
    """PEFT's names of parameters.

    is_exchanged: as PEFT wrote them that mistook inputs for outputs. has_dimensions: as Megatron-Bridge writes them.
    """
    stacks = FusedFactors.of(factors, form).stacks
    tensors: dict[str, Array] = {}
    for (layer, name), (a, b) in stacks.items():
        if is_exchanged:
            a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
        experts, rank, width = a.shape
        b = b.transpose(1, 2, 0)  # [out, rank, experts]
        if not has_dimensions:
            a, b = a.reshape(experts * rank, width), b.reshape(len(b), rank * experts)
        is_inner = name == "gate_up_proj" and (layer, "down_proj") in stacks
        tensors |= _named(f"{layer}.mlp.experts{'.base_layer' if is_inner else ''}", (a, b))
    return tensors


def all_experts(factors: Factors, form: ExpertsForm, is_fused: bool = True) -> dict[str, Array]:
    """All experts in a tensor, under the names of linears."""
    tensors: dict[str, Array] = {}
    if is_fused:
        for (layer, name), pair in FusedFactors.of(factors, form).stacks.items():
            tensors |= _named(f"{layer}.mlp.experts.{name}", pair)
        return tensors
    for layer, module_id in sorted({(layer, module_id) for layer, module_id, _ in factors}):
        pair = (stacked(factors, layer, module_id, 0), stacked(factors, layer, module_id, 1))
        name = {GATE: "w1", UP: "w3", DOWN: "w2"}[module_id]
        tensors |= _named(f"{layer}.mlp.experts.{name}", pair)
    return tensors


def shared_outer(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Tensors of all experts with one matrix where all are equal."""
    return {key: value[:1] if (value == value[:1]).all() else value for key, value in tensors.items()}


FORMS: dict[str, Callable[[Factors, ExpertsForm], dict[str, Array]]] = {
    "one expert a tensor": lambda factors, form: numbered(factors),
    "Mixtral's names": lambda factors, form: mixtral(factors),
    "one expert a tensor, gate and up in one": numbered_fused,
    "Unsloth": lambda factors, form: numbered_fused(factors, form, unsloth=True),
    "PEFT": wrapped,
    "PEFT, inputs taken for outputs": lambda factors, form: wrapped(factors, form, is_exchanged=True),
    "Megatron-Bridge": lambda factors, form: wrapped(factors, form, has_dimensions=True),
    "all experts a tensor": all_experts,
    "all experts a tensor, w1, w3 and w2": lambda factors, form: all_experts(factors, form, is_fused=False),
}
"""The tensors of a file, by what writes it so."""

UNORDERED = frozenset({"one expert a tensor, gate and up in one", "Megatron-Bridge", "all experts a tensor"})
"""Forms whose writers differ in the order of the rows of gate and up, where these alternate in the model."""


def forms_for(sites: ModelSites) -> list[str]:
    """The names of forms that are read for a model."""
    return [name for name in FORMS if not sites.experts_form.is_interleaved or name not in UNORDERED]


def read_values(reader: LinearReader, linear: PeftLinear) -> Pair:
    """A and B with the scale, put together from the pieces that a reader gives; for float32 adapters."""
    pair = (
        np.full((linear.rank, linear.in_size), np.nan, np.float32),
        np.full((linear.out_size, linear.rank), np.nan, np.float32),
    )
    for one in reader.read(linear):
        pair[one.index][one.first : one.first + len(one.values)] = one.values
    return pair


def read_factors(adapter: PeftAdapter) -> dict[tuple[int, int, int], Pair]:
    """All factors of an adapter, with the scale in B."""
    reader = LinearReader(adapter, dtype="FP32")
    return {(one.layer, one.module_id, one.expert): read_values(reader, one) for one in adapter.linears}
