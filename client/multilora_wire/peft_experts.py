"""LoRA on the experts of a mixture, in the forms in which trainers write it: names, shapes and the order of values.

PEFT's names of parameters, `experts.base_layer` and `experts`, have the E experts of a layer in one tensor:
    A is `[E * rank, in]`, expert by expert. B is `[out, rank * E]`: in its rows the experts alternate value by value.
    Megatron-Bridge writes the same values under the same names as A `[E, rank, in]` and B `[out, rank, E]`.
    The sizes tell `gate_up_proj` from `down_proj`, the names do not. Versions of PEFT that mistook the inputs of an
    expert for its outputs wrote A `[E * rank, out]` and B `[in, rank * E]`, so that each is the transpose of the other.
Names of linears, with w1, w3 and w2 for gate, up and down:
    `experts.3.gate_proj` is one expert; so are `experts.3.gate_up_proj` and Unsloth's `experts.gate_up_projs.3`.
    `experts.gate_proj` has all experts: A `[E, rank, in]`, B `[E, out, rank]`. A tensor `[1, ...]` there, or a matrix
    `experts.shared.gate_proj`, is the same for all experts, and the other side may be one expert a tensor.

`gate_up_proj` is split into gate and up, which have the same A. Their rows of B are halves, or alternate, as the rows
of the model's own `gate_up_proj` do. Where these alternate (gpt-oss), only PEFT's tensors of two dimensions and
Unsloth's are known to do so, too: Megatron-Bridge writes, and SGLang reads, halves under the name that vLLM reads as
alternating rows. So other forms of `gate_up_proj` are refused there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from multilora_wire.adapter_origin import WrongBaseModel, describe_missing
from multilora_wire.messages import shown
from multilora_wire.module_names import MOE_4H_TO_H, MOE_GATE, MOE_H_TO_4H
from multilora_wire.peft_config import PEFT_CONFIG_FILE, PeftConfig, PeftError, SitesMissing, quoted
from multilora_wire.sites import ModelSites, WireModule
from multilora_wire.tensor_file import StoredMatrix, TensorPlace, TensorSlice

Side = Literal["a", "b"]

SIDES: Mapping[Side, str] = {"a": "lora_A", "b": "lora_B"}

_UNSLOTHS = {"gate_up_projs": "gate_up_proj", "down_projs": "down_proj"}
_LINEARS = {
    **{name: name for name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")},
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}
"""Hugging Face's names of linears, by the names in keys."""

_NAME = "|".join(_LINEARS)
_KEYS = tuple(
    re.compile(rf"(?:mlp|block_sparse_moe)\.experts{rest}", re.ASCII)
    for rest in (
        r"(?P<level>|\.base_layer)",
        rf"\.(?P<number>[0-9]{{1,6}})\.(?P<linear>{_NAME})",
        rf"\.(?:shared\.)?(?P<linear>{_NAME})",
        rf"\.(?P<linear>{'|'.join(_UNSLOTHS)})\.(?P<number>[0-9]{{1,6}})",
    )
)

_MODULES: Mapping[str, tuple[int, ...]] = {
    "gate_proj": (MOE_H_TO_4H,),
    "up_proj": (MOE_GATE,),
    "down_proj": (MOE_4H_TO_H,),
    "gate_up_proj": (MOE_H_TO_4H, MOE_GATE),
}
"""Wire modules by Hugging Face's names. The gate is the first one of `gate_up_proj`."""

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", re.ASCII)


@dataclass(frozen=True)
class FoundPart:
    """A tensor of a module. peft_name: of the module in PEFT's model, which patterns of the configuration match."""

    place: TensorPlace
    peft_name: str

    def __str__(self) -> str:
        return f"{shown(self.place.key)} {list(self.place.shape)}"


_Pair = Mapping[Side, FoundPart]
_Numbered = dict[int | None, FoundPart]
"""Tensors by the number of their expert; None for one tensor of all experts."""


@dataclass(frozen=True)
class ExpertPair:
    """A `[rank, in]` and B `[out, rank]` of one linear of one expert.

    name: of the experts' linear, such as `model.layers.3.mlp.experts.up_proj`. scaling: alpha / rank, or alpha /
    sqrt(rank).
    """

    name: str
    module: WireModule
    expert: int
    a: StoredMatrix
    b: StoredMatrix
    scaling: float


class ExpertTensors:
    """The tensors of a file that belong to experts."""

    def __init__(self) -> None:
        self._wrapped: dict[tuple[int, str], dict[Side, FoundPart]] = {}
        self._named: dict[tuple[int, str], dict[Side, _Numbered]] = {}

    def add(self, layer: int, path: str, side: Side | None, found: FoundPart) -> bool:
        """Whether the module `path` of a layer is one of experts. side: None for what is neither A nor B.

        Raises PeftError for a tensor that experts cannot have.
        """
        match = next((match for key in _KEYS if (match := key.fullmatch(path))), None)
        if match is None:
            return False
        if side is None:
            raise PeftError(f"{shown(found.place.key)}: DoRA on experts is not supported")
        fields = match.groupdict()
        if "level" in fields:
            owner = self._wrapped.setdefault((layer, fields["level"]), {}).setdefault(side, found)
        else:
            linear, number = fields["linear"], fields.get("number")
            sides = self._named.setdefault((layer, _UNSLOTHS.get(linear) or _LINEARS[linear]), {})
            owner = sides.setdefault(side, {}).setdefault(None if number is None else int(number), found)
        if owner is not found:
            raise PeftError(f"{shown(found.place.key)} and {shown(owner.place.key)} are the same matrix")
        return True

    def parts(self) -> Iterator[FoundPart]:
        """All tensors."""
        for pair in self._wrapped.values():
            yield from pair.values()
        for sides in self._named.values():
            for numbered in sides.values():
                yield from numbered.values()

    def pairs(self, config: PeftConfig, sites: ModelSites | None, model: str) -> Iterator[ExpertPair]:
        """The matrices of all experts that the file has. model: the name of the model with these sites.

        Raises PeftError, or WrongBaseModel for the experts of another model.
        """
        first = next(self.parts(), None)
        if first is None:
            return
        if sites is None:
            raise SitesMissing(
                f"{shown(first.place.key)} belongs to experts, which cannot be read without the base model's "
                "config.json: name its directory (multilora convert --base-model DIR)"
            )
        for field in ("use_dora", "use_bdlora"):
            if config.is_on(field):
                raise PeftError(
                    f"{PEFT_CONFIG_FILE}: {field} is {quoted(config.fields[field])}, and {shown(first.place.key)} "
                    "belongs to experts, for which only plain LoRA is supported"
                )
        if self._wrapped and self._named:
            numbered = next(iter(next(iter(self._named.values())).values()))
            raise _two_forms(first, next(iter(numbered.values())))
        reader = _PairReader(config, sites, model)
        owners: dict[tuple[int, int, int], ExpertPair] = {}
        for pair in reader.wrapped(self._wrapped) if self._wrapped else reader.named(self._named):
            owner = owners.setdefault((pair.module.layer, pair.module.module_id, pair.expert), pair)
            if owner is not pair:
                raise PeftError(
                    f"{shown(pair.b.place.key)} and {shown(owner.b.place.key)} both adapt {pair.module.name} of expert "
                    f"{pair.expert} in layer {pair.module.layer}"
                )
            yield pair


def _two_forms(first: FoundPart, other: FoundPart) -> PeftError:
    return PeftError(f"{first} and {other} are two forms of adapters on experts, and a file has one")


@dataclass(frozen=True)
class _Wrapped:
    """A and B under PEFT's names of parameters. fits: the linears that have their sides, and whether the file has
    inputs and outputs exchanged.
    """

    layer: int
    a: FoundPart
    b: FoundPart
    rank: int
    fits: tuple[tuple[str, bool], ...]

    @property
    def sides(self) -> tuple[int, int]:
        """Columns of A and rows of B."""
        return self.a.place.shape[-1], self.b.place.shape[0]

    def matrices(self, expert: int, num_experts: int, is_exchanged: bool) -> tuple[StoredMatrix, StoredMatrix]:
        """A and B of an expert."""
        rank, (width, height) = self.rank, self.sides
        first, num_mixed = expert * rank * width, num_experts * rank
        if is_exchanged:
            a = TensorSlice(expert, num_experts, num_mixed, num_experts)
            b = TensorSlice(first, 1, width)
            return (
                StoredMatrix(self.b.place, (rank, height), slice=a),
                StoredMatrix(self.a.place, (width, rank), slice=b),
            )
        a = TensorSlice(first, width, 1)
        b = TensorSlice(expert, num_mixed, num_experts, num_experts)
        return (
            StoredMatrix(self.a.place, (rank, width), slice=a),
            StoredMatrix(self.b.place, (height, rank), slice=b),
        )


class _PairReader:
    """Finds the matrices of the experts of a model."""

    def __init__(self, config: PeftConfig, sites: ModelSites, model: str) -> None:
        self._config = config
        self._sites = sites
        self._model = model

    def named(self, found: Mapping[tuple[int, str], Mapping[Side, _Numbered]]) -> Iterator[ExpertPair]:
        """The matrices under names of linears."""
        for (layer, linear), sides in found.items():
            modules = self._modules(layer, linear)
            num_experts = modules[0].experts
            a_parts, b_parts = (self._by_expert(sides.get(side, {}), num_experts) for side in SIDES)
            if None in sides.get("a", {}) and _is_shared(sides["a"][None]) and b_parts:
                a_parts = {expert: a_parts[expert] for expert in b_parts}
            if None in sides.get("b", {}) and _is_shared(sides["b"][None]) and a_parts:
                b_parts = {expert: b_parts[expert] for expert in a_parts}
            for expert in sorted(a_parts.keys() | b_parts.keys()):
                a, b = _both(a_parts.get(expert), b_parts.get(expert))
                if ".gate_up_projs." not in b.peft_name:
                    self._check_order(linear, b)
                a_matrix = self._matrix(a, expert, num_experts if None in sides["a"] else 0)
                b_matrix = self._matrix(b, expert, num_experts if None in sides["b"] else 0)
                # The name of one expert is longer than that of all.
                peft_name = max(a.peft_name, b.peft_name, key=len)
                yield from self._split(modules, expert, a_matrix, b_matrix, peft_name, _other_names(peft_name, linear))

    def wrapped(self, found: Mapping[tuple[int, str], _Pair]) -> Iterator[ExpertPair]:
        """The matrices under PEFT's names of parameters."""
        pairs = [(layer, *_both(pair.get("a"), pair.get("b"))) for (layer, _), pair in found.items()]
        first = pairs[0][1]
        for _, a, b in pairs:
            for part in (a, b):
                if len(part.place.shape) != len(first.place.shape):
                    raise _two_forms(first, part)
        tensors = [self._fit(layer, a, b) for layer, a, b in pairs]
        seen = {one.fits[0][1] for one in tensors if len(one.fits) == 1}
        for one in tensors:
            linear, is_exchanged = one.fits[0] if len(one.fits) == 1 else self._find_square(one, seen)
            modules = self._modules(one.layer, linear)
            if len(first.place.shape) == 3:
                self._check_order(linear, one.b)
            name = f"{one.a.peft_name.removesuffix('.base_layer')}.{linear}"
            others = (one.a.peft_name, *_other_names(one.a.peft_name, linear))
            for expert in range(modules[0].experts):
                matrices = one.matrices(expert, modules[0].experts, is_exchanged)
                yield from self._split(modules, expert, *matrices, name, others)

    def _modules(self, layer: int, linear: str) -> list[WireModule]:
        """The wire modules of a linear of experts: two of `gate_up_proj`. Raises WrongBaseModel."""
        places = [(layer, module_id) for module_id in _MODULES[linear]]
        modules = [self._sites.module_at.get(place) or self._sites.left_out_at.get(place) for place in places]
        there = [module for module in modules if module is not None]
        if len(there) < len(modules):
            name = f"model.layers.{layer}.mlp.experts.{linear}"
            raise self._wrong_model(describe_missing(name, layer, self._sites))
        return there

    def _by_expert(self, parts: _Numbered, num_experts: int) -> dict[int, FoundPart]:
        """The tensor of each expert."""
        numbers = {number: part for number, part in parts.items() if number is not None}
        for number, part in numbers.items():
            if number >= num_experts:
                raise self._wrong_model(f"{part} is of expert {number}, and the model here has {num_experts} experts")
        if None not in parts:
            return numbers
        for part in numbers.values():
            raise PeftError(f"{parts[None]} has all experts, and {part} is one of them")
        return dict.fromkeys(range(num_experts), parts[None])

    def _matrix(self, part: FoundPart, expert: int, num_experts: int) -> StoredMatrix:
        """The matrix of an expert in a tensor under the name of a linear.

        num_experts: that the tensor may have; 0 for a tensor of one expert.
        """
        shape = part.place.shape
        if len(shape) not in ((2, 3) if num_experts else (2,)) or 0 in shape:
            raise PeftError(f"{part} is not a matrix{' or one matrix for each expert' if num_experts else ''}")
        if len(shape) == 2:
            return StoredMatrix(part.place, (shape[0], shape[1]))
        if shape[0] not in (1, num_experts):
            raise self._wrong_model(f"{part} has {shape[0]} experts, and the model here has {num_experts}")
        rows, columns = shape[1:]
        start = 0 if shape[0] == 1 else expert * rows * columns
        return StoredMatrix(part.place, (rows, columns), slice=TensorSlice(start, columns, 1))

    def _fit(self, layer: int, a: FoundPart, b: FoundPart) -> _Wrapped:
        """Find the linears that have the sides of A and B."""
        gate, down = (self._modules(layer, linear)[0] for linear in ("gate_proj", "down_proj"))
        num_experts, a_shape, b_shape = gate.experts, a.place.shape, b.place.shape
        if len(a_shape) not in (2, 3) or 0 in (*a_shape, *b_shape):
            raise PeftError(f"{a} and {b} are not the matrices of {num_experts} experts")
        for part, count in ((a, a_shape[0]), (b, b_shape[-1])):
            if (count != num_experts) if len(a_shape) == 3 else (count % num_experts):
                raise self._wrong_model(f"{part} is not of {num_experts} experts, as many as the model here has")
        if len(a_shape) == 3:
            ranks = (a_shape[1], b_shape[1])
        else:
            ranks = (a_shape[0] // num_experts, b_shape[1] // num_experts)
        if ranks[0] != ranks[1]:
            raise PeftError(f"{a} and {b} have different ranks")
        here = {"gate_up_proj": (gate.in_size, 2 * gate.out_size), "down_proj": (down.in_size, down.out_size)}
        there = (a_shape[-1], b_shape[0])
        fits = [(linear, False) for linear, sides in here.items() if sides == there]
        if len(a_shape) == 2:  # PEFT alone has exchanged the sides.
            fits += [(linear, True) for linear, sides in here.items() if sides == there[::-1]]
        if not fits:
            known = ", ".join(
                f"{linear} with {sides[0]} inputs and {sides[1]} outputs" for linear, sides in here.items()
            )
            raise self._wrong_model(f"{a} and {b} fit no linear of the {num_experts} experts here, which have {known}")
        return _Wrapped(layer, a, b, ranks[0], tuple(fits))

    def _find_square(self, one: _Wrapped, seen: set[bool]) -> tuple[str, bool]:
        """The linear of a square matrix, and whether its inputs and outputs are exchanged: PEFT's version tells.

        seen: whether inputs and outputs are exchanged where the shapes tell, in this file.
        """
        linear, version = one.fits[0][0], self._config.fields.get("peft_version")
        where = f"{one.a}: {linear} of the experts here has as many inputs as outputs, {one.sides[0]}"
        found = _VERSION.match(version) if isinstance(version, str) else None
        release = tuple(map(int, found.groups())) if found else (0, 0, 0)
        if release < (0, 17, 0):
            raise PeftError(
                f"{where}; only peft_version of {PEFT_CONFIG_FILE} tells them apart, and it is {quoted(version)}"
            )
        if release == (0, 19, 0):
            raise PeftError(
                f"{where}; peft_version of {PEFT_CONFIG_FILE} is {quoted(version)}, which mistook one for the other. "
                "Train the adapter with PEFT 0.19.1 or later"
            )
        is_exchanged = release < (0, 19, 0) and not self._sites.experts_form.is_transposed
        if seen and is_exchanged not in seen:
            raise PeftError(
                f"{where}; by peft_version {quoted(version)} of {PEFT_CONFIG_FILE} they are "
                f"{'exchanged' if is_exchanged else 'in their places'}, unlike those of the file's other experts"
            )
        return linear, is_exchanged

    def _check_order(self, linear: str, b: FoundPart) -> None:
        """Refuse a form of `gate_up_proj` whose trainers differ about the order of rows, if this makes a difference."""
        if linear == "gate_up_proj" and self._sites.experts_form.is_interleaved:
            raise PeftError(
                f"{b}: outputs of gate and up alternate in the gate_up_proj of this model, and writers of this form of "
                "adapters differ in whether theirs do. Write gate_proj and up_proj apart, or in PEFT's form "
                "(target_parameters)"
            )

    def _split(
        self,
        modules: list[WireModule],
        expert: int,
        a: StoredMatrix,
        b: StoredMatrix,
        name: str,
        others: tuple[str, ...],
    ) -> Iterator[ExpertPair]:
        """The pairs of all modules of a linear.

        name: by which the configuration knows the linear. others: by which its lists may mean the linear, too.
        """
        rank, wanted = a.shape[0], self._config.rank(name)
        if rank != b.shape[1]:
            raise PeftError(f"{_sizes(a, b, expert)} have different ranks")
        if rank != wanted:
            raise PeftError(
                f"{_sizes(a, b, expert)} have rank {rank} in a model of {modules[0].experts} experts, but "
                f"{PEFT_CONFIG_FILE} says {wanted:g}"
            )
        self._config.check_target(name, others)
        scaling = self._config.scaling(name, rank)
        if len(modules) == 2 and b.shape[0] % 2:
            raise PeftError(f"{_sizes(a, b, expert)} have {b.shape[0]} outputs, which are not those of gate and up")
        for index, module in enumerate(modules):
            own_b = b if len(modules) == 1 else self._half(b, index)
            linear = self._sites.site_at[module.parts[0].column].name
            yield ExpertPair(f"model.{linear}", module, expert, a, own_b, scaling)

    def _half(self, b: StoredMatrix, index: int) -> StoredMatrix:
        """The rows of B that are gate's (index 0) or up's (1)."""
        (rows, columns), is_interleaved = b.shape, self._sites.experts_form.is_interleaved
        whole = b.slice or TensorSlice(0, columns, 1)
        start = whole.start + index * whole.row_stride * (1 if is_interleaved else rows // 2)
        stride = whole.row_stride * (2 if is_interleaved else 1)
        part = TensorSlice(start, stride, whole.column_stride, whole.num_mixed)
        return StoredMatrix(b.place, (rows // 2, columns), slice=part)

    def _wrong_model(self, difference: str) -> WrongBaseModel:
        return WrongBaseModel.of(self._config.base_model, self._model, difference)


def _sizes(a: StoredMatrix, b: StoredMatrix, expert: int) -> str:
    return f"{shown(a.place.key)} {list(a.shape)} and {shown(b.place.key)} {list(b.shape)} of expert {expert}"


def _is_shared(part: FoundPart) -> bool:
    """Whether a tensor of all experts has one matrix for all."""
    return len(part.place.shape) == 2 or part.place.shape[:1] == (1,)


def _both(a: FoundPart | None, b: FoundPart | None) -> tuple[FoundPart, FoundPart]:
    """Raises PeftError unless both are there."""
    if a is not None and b is not None:
        return a, b
    there = a or b
    assert there is not None
    raise PeftError(f"{shown(there.place.key)} has no {SIDES['b' if a else 'a']} beside it")


def _other_names(peft_name: str, linear: str) -> tuple[str, ...]:
    """The names under which trainers list a linear of experts, one expert or all, gate and up in one or apart."""
    experts = peft_name[: peft_name.index(".experts") + len(".experts")]
    is_down = linear == "down_proj"
    return (experts, *(f"{experts}.{name}" for name, of in _LINEARS.items() if (of == "down_proj") == is_down))
