"""How the weights of linears are stored: the seam between a model and its checkpoint.

A `WeightFormat` makes the weight of each linear. The weight says which tensors of a checkpoint fill it, and multiplies.
A model asks for nothing else, so a format that stores packed integers needs no change of any model.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from multilora_engine.batch.forward_batch import LoRABatch
from multilora_kernels import (
    CodeType,
    HugePages,
    PackedExperts,
    PackedWeight,
    QuantizedWeight,
    activation_dtype,
    float32_linear,
    lora_linear,
    packed_embedding,
    packed_linear,
)

FLOAT_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class Placement:
    """The device that a model lies on, and its types.

    dtype: of arithmetic. weight_dtype: of stored linears and embeddings; the two differ on a CPU
    only, which reads bytes slower than it multiplies.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    _pages: HugePages = field(default_factory=HugePages, init=False, repr=False, compare=False)

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of activations, norms and biases."""
        return activation_dtype(self.dtype, self.device)

    @property
    def keeps_float32(self) -> bool:
        """Whether activations are float32 though the arithmetic is not: operators may round them."""
        return self.activation_dtype != self.dtype

    def weight(self, out_features: int, in_features: int) -> PackedWeight:
        """An uninitialised weight of a linear. On a CPU weights lie in memory in the order of these calls."""
        return PackedWeight.empty(out_features, in_features, self.weight_dtype, self.device, self.dtype, self._pages)

    def exact_weight(self, out_features: int, in_features: int) -> PackedWeight:
        """An uninitialised weight in float32, for products in float32."""
        float32 = torch.float32
        return PackedWeight.empty(out_features, in_features, float32, self.device, float32, self._pages)

    def experts(self, num_experts: int, out_features: int, in_features: int) -> PackedExperts:
        """Uninitialised weights of equal linears, one an expert."""
        shape = (num_experts, out_features, in_features)
        return PackedExperts.empty(*shape, self.weight_dtype, self.device, self.dtype, self._pages)

    def quantized_experts(
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        code_type: CodeType,
        group_size: int,
        scale_dtype: torch.dtype,
    ) -> PackedExperts:
        """Uninitialised weights of codes, one an expert."""
        return PackedExperts.of_codes(
            num_experts,
            out_features,
            in_features,
            code_type,
            group_size,
            scale_dtype,
            self.device,
            pages=self._pages,
            compute_dtype=self.activation_dtype,
            may_round=self.keeps_float32,
        )

    def quantized_weight(
        self,
        out_features: int,
        in_features: int,
        code_type: CodeType,
        group_size: int,
        scale_dtype: torch.dtype,
        zero_dtype: torch.dtype = torch.int8,
    ) -> QuantizedWeight:
        """An uninitialised weight of codes; in memory it lies as `weight`s do."""
        return QuantizedWeight(
            out_features,
            in_features,
            code_type,
            group_size,
            scale_dtype,
            self.device,
            zero_dtype=zero_dtype,
            pages=self._pages,
            compute_dtype=self.activation_dtype,
            may_round=self.keeps_float32,
        )

    def embeddings(self, num_embeddings: int, size: int) -> PackedWeight:
        """Uninitialised embeddings of a model whose head is another weight: plain rows are quicker to look up."""
        rows = torch.empty(num_embeddings, size, dtype=self.weight_dtype, device=self.device)
        return PackedWeight(rows, num_embeddings)

    def vectors(self, *shape: int) -> torch.Tensor:
        """Uninitialised norms or biases."""
        return torch.empty(shape, dtype=self.activation_dtype, device=self.device)


class Destination(Protocol):
    """The place of one tensor of a checkpoint. dtypes: the stored types that it takes."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtypes(self) -> frozenset[torch.dtype]: ...

    def copy_(self, values: torch.Tensor, /) -> object:
        """Raises ConfigError, which names the tensor, where the values disagree with those of others."""
        ...


class ReadablePlace(Destination, Protocol):
    """The place of a tensor of floats, which stays as it is."""

    def tensor(self) -> torch.Tensor:
        """The tensor as the checkpoint has it."""
        ...


@dataclass(frozen=True)
class VectorPlace:
    """A norm or a bias. offset: added to the checkpoint's values; Gemma stores norms less one."""

    values: torch.Tensor
    offset: float = 0.0
    dtypes: frozenset[torch.dtype] = FLOAT_DTYPES

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def copy_(self, values: torch.Tensor, /) -> None:
        self.values.copy_(values.float() + self.offset if self.offset else values)

    def tensor(self) -> torch.Tensor:
        return self.values - self.offset


@dataclass(frozen=True)
class WeightRows:
    """The rows first .. first + count of a packed weight."""

    weight: PackedWeight
    first: int
    count: int
    dtypes: frozenset[torch.dtype] = FLOAT_DTYPES

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count, self.weight.shape[1]))

    def copy_(self, values: torch.Tensor, /) -> None:
        self.weight.copy_rows(self.first, values)

    def tensor(self) -> torch.Tensor:
        return self.weight.rows(self.first, self.count)


@dataclass(frozen=True)
class SplitPlace:
    """The place of one tensor of a checkpoint that holds the tensors of several places, each at an index of it.

    is_transposed: the indices are those of the tensor with its last two dimensions swapped.
    """

    shape: torch.Size
    places: Sequence[tuple[tuple[int | slice, ...], Destination]]
    is_transposed: bool = False

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return self.places[0][1].dtypes

    def copy_(self, values: torch.Tensor, /) -> None:
        values = values.mT if self.is_transposed else values
        for index, place in self.places:
            place.copy_(values[index])


@dataclass(frozen=True)
class StoredPart:
    """One linear of a checkpoint: `name`.weight is the rows first .. first + count of a fused weight."""

    name: str
    first: int
    count: int


@dataclass(frozen=True)
class ExpertStack:
    """The one tensor `name` that some checkpoints have of all experts, [experts, outputs, inputs].

    is_interleaved: as in gpt-oss, whose checkpoints have no other: the outputs of an expert's linears take turns, and a
        tensor of floats is [experts, inputs, outputs].
    """

    name: str
    is_interleaved: bool = False

    def rows(self, parts: Sequence[StoredPart]) -> list[slice]:
        """The outputs of each linear of an expert."""
        if self.is_interleaved:
            return [slice(place, None, len(parts)) for place in range(len(parts))]
        return [slice(part.first, part.first + part.count) for part in parts]


class WeightSwitch(Protocol):
    """A weight of codes that may also be kept as floats, which are multiplied then.

    names: its modules in the checkpoint. kind: its codes, in words. floats: None: the codes are multiplied.
    """

    floats: PackedWeight | None

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def kind(self) -> str: ...

    @property
    def codes(self) -> QuantizedWeight: ...


class StoredWeight(Protocol):
    """The weight of a linear, or the weights of all experts, stored in some format."""

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Memory, by the type it is stored in, in words."""
        ...

    @property
    def switches(self) -> Sequence[WeightSwitch]:
        """The parts that may be kept as floats beside their codes."""
        ...

    def checkpoint_tensors(self) -> dict[str, Destination]:
        """The places of all tensors that the checkpoint has of the weight, by their names."""
        ...


class ExpertWeights(StoredWeight, Protocol):
    """The weights of equal linears, one an expert.

    weight: [num_experts, out_features, in_features], for `expert_mlp`.
    """

    @property
    def weight(self) -> PackedExperts: ...


class LinearWeight(StoredWeight, Protocol):
    """The weight W [out_features, in_features] of one linear, stored in some format."""

    def packed(self) -> PackedWeight | QuantizedWeight | None:
        """The weight for a whole layer in one call (`decoder_layers`); None where this format has no such call."""
        ...

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias. x: [num_tokens, in_features]. Returns [num_tokens, out_features]."""
        ...

    def product_with_adapters(
        self, x: torch.Tensor, bias: torch.Tensor | None, first_column: int, slice_sizes: Sequence[int], lora: LoRABatch
    ) -> torch.Tensor:
        """x W^T plus each token's adapter, then the bias. The slices of W are the tables' columns from first_column."""
        ...


class EmbeddingWeight(LinearWeight, Protocol):
    """A weight whose rows are also looked up."""

    def embed(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows `token_ids` of W as `dtype`, [num_tokens, in_features]. token_ids: [num_tokens] int64."""
        ...

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T in float32, [num_tokens, out_features], in `out` if there is one."""
        ...

    def readable(self) -> ReadablePlace | None:
        """The place of the one tensor that the checkpoint has of it; None where it has several."""
        ...


class WeightFormat(Protocol):
    """Makes the weights of a model, each in the way it is stored. `parts` are the linears of a checkpoint in order."""

    @property
    def placement(self) -> Placement: ...

    def stores(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        ...

    def linear(self, parts: Sequence[StoredPart], in_features: int) -> LinearWeight: ...

    def router(self, part: StoredPart, in_features: int) -> LinearWeight:
        """The weight of a router, in float32: a rounded one would choose other experts."""
        ...

    def experts(self, parts: Sequence[Sequence[StoredPart]], in_features: int, stack: ExpertStack) -> ExpertWeights:
        """parts: for each expert the linears that its weight stacks, of equal sizes for all.

        stack: the one tensor that some checkpoints have in place of them all.
        """
        ...

    def head(self, part: StoredPart, in_features: int) -> EmbeddingWeight:
        """The weight of the language-model head, also if it is that of the embeddings."""
        ...

    def embeddings(self, part: StoredPart, in_features: int) -> EmbeddingWeight:
        """The weight of embeddings that are not the head's."""
        ...

    def ignores(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the checkpoint that no weight asks for says nothing about the model."""
        ...


@dataclass(frozen=True)
class FloatWeight:
    """A weight stored as floats. parts: the linears of the checkpoint that it stacks."""

    weight: PackedWeight
    parts: Sequence[StoredPart]

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        return {str(self.weight.data.dtype).removeprefix("torch."): self.weight.data.nbytes}

    @property
    def switches(self) -> Sequence[WeightSwitch]:
        return ()

    def packed(self) -> PackedWeight | None:
        return self.weight if self.weight.is_packed else None

    def checkpoint_tensors(self) -> dict[str, Destination]:
        return {f"{part.name}.weight": WeightRows(self.weight, part.first, part.count) for part in self.parts}

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return packed_linear(x, self.weight, bias)

    def product_with_adapters(
        self, x: torch.Tensor, bias: torch.Tensor | None, first_column: int, slice_sizes: Sequence[int], lora: LoRABatch
    ) -> torch.Tensor:
        return lora_linear(x, self.weight, lora.tables, first_column, slice_sizes, lora.segments, bias)

    def embed(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return packed_embedding(token_ids, self.weight, dtype)

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return float32_linear(x, self.weight, out)

    def readable(self) -> ReadablePlace:
        return WeightRows(self.weight, 0, self.weight.shape[0])


@dataclass(frozen=True)
class FloatExperts:
    """Weights of experts stored as floats. parts: for each expert the linears of the checkpoint that it stacks.

    stack: the checkpoint's one tensor of all experts; None where each has tensors of its own.
    """

    weight: PackedExperts
    parts: Sequence[Sequence[StoredPart]]
    stack: ExpertStack | None

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        return {str(self._experts[0].data.dtype).removeprefix("torch."): self.weight.nbytes}

    @property
    def switches(self) -> Sequence[WeightSwitch]:
        return ()

    def checkpoint_tensors(self) -> dict[str, Destination]:
        places = [
            [WeightRows(expert, part.first, part.count) for part in parts]
            for expert, parts in zip(self._experts, self.parts, strict=True)
        ]
        if self.stack is None:
            pairs = zip(itertools.chain(*self.parts), itertools.chain(*places), strict=True)
            return {f"{part.name}.weight": place for part, place in pairs}
        num_experts, outputs, inputs = self.weight.shape
        is_transposed = self.stack.is_interleaved
        shape = torch.Size((num_experts, *((inputs, outputs) if is_transposed else (outputs, inputs))))
        return {self.stack.name: SplitPlace(shape, at_experts(self.stack.rows(self.parts[0]), places), is_transposed)}

    @property
    def _experts(self) -> list[PackedWeight]:
        experts = [self.weight.expert(index) for index in range(len(self.parts))]
        assert all(isinstance(expert, PackedWeight) for expert in experts)
        return cast(list[PackedWeight], experts)


@dataclass(frozen=True)
class FloatFormat:
    """float32, bfloat16 or float16, as the placement says. names: of the checkpoint's tensors."""

    placement: Placement
    names: Container[str] = frozenset()

    def stores(self, name: str) -> bool:
        return name in self.names

    def linear(self, parts: Sequence[StoredPart], in_features: int) -> FloatWeight:
        return FloatWeight(self.placement.weight(num_outputs(parts), in_features), parts)

    def router(self, part: StoredPart, in_features: int) -> FloatWeight:
        return FloatWeight(self.placement.exact_weight(part.count, in_features), [part])

    def experts(self, parts: Sequence[Sequence[StoredPart]], in_features: int, stack: ExpertStack) -> FloatExperts:
        weight = self.placement.experts(len(parts), num_outputs(parts[0]), in_features)
        return FloatExperts(weight, parts, stack if self.has_stack(stack) else None)

    def has_stack(self, stack: ExpertStack) -> bool:
        """Whether the checkpoint has, or must have, one tensor of all experts."""
        return stack.is_interleaved or self.stores(stack.name)

    def head(self, part: StoredPart, in_features: int) -> FloatWeight:
        return self.linear([part], in_features)

    def embeddings(self, part: StoredPart, in_features: int) -> FloatWeight:
        return FloatWeight(self.placement.embeddings(part.count, in_features), [part])

    def ignores(self, name: str, tensor: torch.Tensor) -> bool:
        return False


def at_experts(
    rows: Sequence[slice], places: Sequence[Sequence[Destination]]
) -> list[tuple[tuple[int | slice, ...], Destination]]:
    """`places` of a `SplitPlace` of all experts. rows: of each linear of an expert. places: of each, by expert."""
    return [
        ((expert, of_linear), place)
        for expert, of_expert in enumerate(places)
        for of_linear, place in zip(rows, of_expert, strict=True)
    ]


def num_outputs(parts: Sequence[StoredPart]) -> int:
    """The outputs of the weight that stacks `parts`."""
    return sum(part.count for part in parts)
