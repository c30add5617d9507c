"""`CheckpointFormat`: each weight in the way that its checkpoint stores it."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from multilora_engine.errors import ConfigError
from multilora_engine.models.checkpoint import Checkpoint
from multilora_engine.models.quantization.part import SCALE_DTYPES, PartFilling, QuantizedPart, as_array
from multilora_engine.models.quantization.weights import CodedExperts, CodedWeight, DequantizedWeight, StackedWeight
from multilora_engine.models.weights import (
    Destination,
    EmbeddingWeight,
    ExpertStack,
    ExpertWeights,
    FloatFormat,
    FloatWeight,
    LinearWeight,
    Placement,
    SplitPlace,
    StoredPart,
    WeightFormat,
    at_experts,
    num_outputs,
)
from multilora_kernels import PackedExperts
from multilora_kernels.interpreter import has_gpu_operators
from multilora_kernels.quantized import QuantizedWeight
from multilora_wire.module_names import FUSED_NAMES
from multilora_wire.quantized.ggml import GGMLBlocks, with_one_layout
from multilora_wire.quantized.names import ModuleClass
from multilora_wire.quantized.quantization import Quantization, read_quantization
from multilora_wire.quantized.scheme import (
    Array,
    Expected,
    QuantizationError,
    Scheme,
    StoredTensor,
    check_stored,
    input_order,
)
from multilora_wire.sites import ModelSites

_logger = logging.getLogger(__name__)

_OF_ACTIVATIONS = re.compile(r".+\.((input|output|q|k|v|kv|prob|prob_output)_(scale|zero_point)|input_global_scale)")
"""Tensors that round activations, keys or values."""
_BIAS = ".bias"


@dataclass(frozen=True)
class CheckpointFormat:
    """The format of a quantised checkpoint; weights that it leaves as floats are stored as the placement says."""

    placement: Placement
    checkpoint: Checkpoint
    quantization: Quantization

    def stores(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def linear(self, parts: Sequence[StoredPart], in_features: int) -> LinearWeight:
        coded = [self._coded(part, in_features, "Linear") for part in parts]
        if all(part is None for part in coded):
            return self._floats.linear(parts, in_features)
        known = _with_one_layout([part for part in coded if part is not None])
        if len(known) == len(parts) and self._are_floats_here(known):
            return DequantizedWeight(self._floats.linear(parts, in_features).weight, parts, known)
        if len(known) == len(parts) and all(_lie_together(*pair) for pair in itertools.pairwise(known)):
            return self._weight(known)
        alone = [replace(part, first=0) for part in parts]
        return StackedWeight(
            [
                self._floats.linear([part], in_features) if found is None else self._weight([found])
                for part, found in zip(alone, coded, strict=True)
            ]
        )

    def router(self, part: StoredPart, in_features: int) -> LinearWeight:
        if self._coded(part, in_features, "Linear") is not None:
            raise ConfigError(f"{self.checkpoint.path}: {part.name} is quantised: routers are read as floats only")
        return self._floats.router(part, in_features)

    def experts(self, parts: Sequence[Sequence[StoredPart]], in_features: int, stack: ExpertStack) -> ExpertWeights:
        stacked = self._coded_stack(parts, in_features, stack)
        if stacked is not None:
            return self._stacked_experts(stacked, stack)
        if self._floats.has_stack(stack):
            return self._floats.experts(parts, in_features, stack)
        coded = [[self._coded(part, in_features, "Linear") for part in of_expert] for of_expert in parts]
        if not any(part is not None for of_expert in coded for part in of_expert):
            return self._floats.experts(parts, in_features, stack)
        known = self._alike(parts, coded)
        weight = self._expert_codes(known)
        tensors: dict[str, Destination] = {}
        for filling in itertools.chain(*_expert_fillings(known, weight)):
            tensors |= filling.places()
        return CodedExperts(weight, known[0][0].layout, tensors)

    def _stacked_experts(self, parts: Sequence[Sequence[QuantizedPart]], stack: ExpertStack) -> CodedExperts:
        """Experts of codes in one tensor for all of them. parts: of each expert, with tensors of their own."""
        weight = self._expert_codes(parts)
        fillings, rows = _expert_fillings(parts, weight), stack.rows([part.stored for part in parts[0]])
        tensors: dict[str, Destination] = {}
        for suffix in parts[0][0].tensors:
            name = f"{stack.name}_{suffix}"
            places = [[filling.place(suffix) for filling in of_expert] for of_expert in fillings]
            tensors[name] = SplitPlace(torch.Size(self.checkpoint.tensors[name].shape), at_experts(rows, places))
        return CodedExperts(weight, parts[0][0].layout, tensors)

    def _expert_codes(self, parts: Sequence[Sequence[QuantizedPart]]) -> PackedExperts:
        """The weights of experts whose parts lie together."""
        first = parts[0][0]
        return self.placement.quantized_experts(
            len(parts),
            num_outputs([part.stored for part in parts[0]]),
            first.in_features,
            first.layout.code_type,
            first.layout.group_size,
            first.layout.scale_dtype,
        )

    def _alike(
        self, parts: Sequence[Sequence[StoredPart]], coded: Sequence[Sequence[QuantizedPart | None]]
    ) -> list[list[QuantizedPart]]:
        """`coded`, if all are stored in one way. Raises ConfigError, which names two that are not.

        Then all experts lie in one weight, and the operator multiplies all that a step uses in one call.
        """
        pairs = list(zip(itertools.chain(*parts), itertools.chain(*coded), strict=True))
        first, kind = pairs[0][0].name, _kind(pairs[0][1])
        for part, found in pairs:
            if _kind(found) != kind:
                raise ConfigError(
                    f"{self.checkpoint.path}: {first} is stored as {kind} and {part.name} as {_kind(found)}: the "
                    "experts of a layer must be stored in one way"
                )
            if found is not None and found.order is not None:
                raise ConfigError(
                    f"{self.checkpoint.path}: {part.name}.{found.scheme.group_index_name} groups inputs by their "
                    "activations, which is not served for experts; quantise the model again with desc_act false or "
                    "actorder weight"
                )
        return [[part for part in of_expert if part is not None] for of_expert in coded]

    def _coded_stack(
        self, parts: Sequence[Sequence[StoredPart]], in_features: int, stack: ExpertStack
    ) -> list[list[QuantizedPart]] | None:
        """The linears of each expert, if the checkpoint has one tensor of codes for all of them; None if it has not."""

        def stored(suffix: str) -> StoredTensor | None:
            return self.checkpoint.tensors.get(f"{stack.name}_{suffix}")

        try:
            scheme = self.quantization.scheme(stack.name, "Experts", lambda suffix: stored(suffix) is not None)
            if scheme is None:
                return None
            of_expert = scheme.tensors((num_outputs(parts[0]), in_features), stored)
            tensors = {}
            for suffix, one in of_expert.items():
                of_all = Expected(tuple((len(parts), *shape) for shape in one.shapes), one.dtypes)
                tensors[suffix] = check_stored(f"{stack.name}_{suffix}", stored(suffix), of_all)
        except QuantizationError as error:
            raise ConfigError(f"{self.checkpoint.path}: {error}") from error

        def coded(expert: int, part: StoredPart) -> QuantizedPart:
            own = {
                suffix: StoredTensor(found.dtype, (part.count, *found.shape[2:])) for suffix, found in tensors.items()
            }
            named = replace(part, name=f"{stack.name} of expert {expert}")
            return QuantizedPart(named, in_features, scheme, own, _scale_dtype(scheme, own), None)

        return [[coded(expert, part) for part in linears] for expert, linears in enumerate(parts)]

    def head(self, part: StoredPart, in_features: int) -> EmbeddingWeight:
        return self._outer(part, in_features, self._floats.head)

    def embeddings(self, part: StoredPart, in_features: int) -> EmbeddingWeight:
        return self._outer(part, in_features, self._floats.embeddings)

    def ignores(self, name: str, tensor: torch.Tensor) -> bool:
        # Old versions of AutoGPTQ store a bias of zeros for every linear.
        is_no_bias = name.endswith(_BIAS) and tensor.is_floating_point() and not tensor.any()
        return _OF_ACTIVATIONS.fullmatch(name) is not None or is_no_bias

    @property
    def _floats(self) -> FloatFormat:
        return FloatFormat(self.placement, self.checkpoint.tensors)

    def _outer(
        self, part: StoredPart, in_features: int, make_floats: Callable[[StoredPart, int], FloatWeight]
    ) -> EmbeddingWeight:
        coded = self._coded(part, in_features, _module_class(part))
        if coded is None:
            return make_floats(part, in_features)
        if self._are_floats_here([coded]):
            return DequantizedWeight(make_floats(part, in_features).weight, [part], [coded])
        return self._weight([coded])

    def _are_floats_here(self, parts: Sequence[QuantizedPart]) -> bool:
        """Whether the device has no operators for the codes of parts."""
        has_minimums = any(part.layout.zero_dtype == torch.float32 for part in parts)
        return has_minimums and has_gpu_operators(self.placement.device)

    def _weight(self, parts: Sequence[QuantizedPart]) -> CodedWeight:
        """One weight for parts that lie together."""
        layout, order = parts[0].layout, parts[0].order
        weight = self.placement.quantized_weight(
            num_outputs([part.stored for part in parts]),
            parts[0].in_features,
            layout.code_type,
            layout.group_size,
            layout.scale_dtype,
            layout.zero_dtype,
        )
        first = parts[0].stored.first
        return CodedWeight(
            weight,
            layout,
            [PartFilling(part, weight, part.stored.first - first) for part in parts],
            None if order is None else torch.from_numpy(order).to(self.placement.device),
        )

    def _coded(self, part: StoredPart, in_features: int, module_class: ModuleClass) -> QuantizedPart | None:
        def stored(suffix: str) -> StoredTensor | None:
            return self.checkpoint.tensors.get(f"{part.name}.{suffix}")

        try:
            scheme = self.quantization.scheme(part.name, module_class, lambda suffix: stored(suffix) is not None)
            if scheme is None:
                return None
            expected = scheme.tensors((part.count, in_features), stored)
            tensors = {
                suffix: check_stored(f"{part.name}.{suffix}", stored(suffix), one) for suffix, one in expected.items()
            }
            order = self._input_order(part.name, scheme, tensors)
        except QuantizationError as error:
            raise ConfigError(f"{self.checkpoint.path}: {error}") from error
        return QuantizedPart(part, in_features, scheme, tensors, _scale_dtype(scheme, tensors), order)

    def _input_order(self, name: str, scheme: Scheme, tensors: dict[str, StoredTensor]) -> Array | None:
        if scheme.group_index_name not in tensors:
            return None
        full_name = f"{name}.{scheme.group_index_name}"
        return input_order(full_name, as_array(self.checkpoint.tensor(full_name)), scheme.group_size)


def weight_format(checkpoint: Checkpoint, placement: Placement) -> WeightFormat:
    """The format of a checkpoint; logs the parts of its quantisation that are not done. Raises ConfigError."""
    quantization = _read(checkpoint.path)
    if quantization.schemes is None:
        return FloatFormat(placement, checkpoint.tensors)
    if placement.dtype == torch.float16 and not has_gpu_operators(placement.device):
        raise ConfigError(
            "parameter dtype=float16: on a CPU quantised weights are multiplied in float32 or bfloat16; write one of "
            "these, or auto"
        )
    for note in quantization.schemes.notes:
        _logger.warning("%s: %s", checkpoint.path, note)
    return CheckpointFormat(placement, checkpoint, quantization)


def sites_ruled_out(path: Path, sites: ModelSites) -> list[str]:
    """Names of the sites that the checkpoint in the directory `path` leaves to no adapter. Raises ConfigError.

    A site is also meant by the name of the linear that some checkpoints fuse it into, such as `qkv_proj`.
    """
    rules = _read(path).rules
    names = {site.column: [sites.full_name(site.name)] for site in sites.sites}
    if sites.outer is not None:
        names |= {sites.outer.embeddings.column: ["model.embed_tokens"], sites.outer.head.column: ["lm_head"]}
    for module in sites.modules:
        if (fused := FUSED_NAMES.get(module.module_id)) is not None:
            for part in module.parts:
                names[part.column].append(f"model.layers.{module.layer}.{fused}")
    return [site.name for site in sites.all_sites if not rules.allow(*names[site.column])]


def _read(path: Path) -> Quantization:
    try:
        return read_quantization(path)
    except QuantizationError as error:
        raise ConfigError(str(error)) from error


def _expert_fillings(parts: Sequence[Sequence[QuantizedPart]], weight: PackedExperts) -> list[list[PartFilling]]:
    """For each expert those of its parts."""
    fillings = []
    for expert, of_expert in enumerate(parts):
        own = weight.expert(expert)
        assert isinstance(own, QuantizedWeight)
        fillings.append([PartFilling(part, own, part.stored.first) for part in of_expert])
    return fillings


def _kind(part: QuantizedPart | None) -> str:
    """How a linear is stored, in words."""
    if part is None:
        return "floats"
    return f"{part.layout.words} with scales of {str(part.scale_dtype).removeprefix('torch.')}"


def _scale_dtype(scheme: Scheme, tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    stored = scheme.scale_dtype if isinstance(scheme, GGMLBlocks) else tensors[scheme.scale_name or ""].dtype
    return SCALE_DTYPES[stored]


def _with_one_layout(parts: list[QuantizedPart]) -> list[QuantizedPart]:
    """The parts in a layout that all of them can have; as they are, where there is none."""
    schemes = with_one_layout([part.scheme for part in parts])
    if schemes is None:
        return parts
    return [
        replace(part, scheme=scheme, scale_dtype=SCALE_DTYPES[scheme.scale_dtype])
        for part, scheme in zip(parts, schemes, strict=True)
    ]


def _lie_together(one: QuantizedPart, other: QuantizedPart) -> bool:
    """Whether both fit into one weight: the same layout, and their inputs in the same order."""
    if one.layout != other.layout:
        return False
    if one.order is None or other.order is None:
        return one.order is other.order
    return bool((one.order == other.order).all())


def _module_class(part: StoredPart) -> ModuleClass:
    return "Linear" if part.name == "lm_head" else "Embedding"
