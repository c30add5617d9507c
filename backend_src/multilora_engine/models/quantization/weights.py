"""Linears whose weights are codes: all parts in one weight, or each part in its own; and those of experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from multilora_engine.batch.forward_batch import LoRABatch
from multilora_engine.models.quantization.part import Layout, PartFilling, QuantizedPart
from multilora_engine.models.weights import Destination, FloatWeight, LinearWeight, WeightSwitch
from multilora_kernels import PackedExperts, PackedWeight, float32_linear, lora_linear, packed_linear, updated
from multilora_kernels.quantized import QuantizedWeight, quantized_embedding, quantized_linear, quantized_lora_linear
from multilora_wire.gguf.blocks import TYPES, dequantize
from multilora_wire.quantized.ggml import GGMLBlocks
from multilora_wire.quantized.scheme import StoredTensor


@dataclass
class CodedWeight:
    """A weight of codes. order: its inputs are x[:, order], so that those of a group lie side by side.

    Adapters see x as it is. floats: of a `WeightSwitch`; their inputs are in that order, too. Embeddings are looked up
    in the codes.
    """

    weight: QuantizedWeight
    layout: Layout
    fillings: Sequence[PartFilling]
    order: torch.Tensor | None
    floats: PackedWeight | None = None

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        return {self.layout.words: self.weight.nbytes}

    @property
    def switches(self) -> Sequence[WeightSwitch]:
        return (self,)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filling.part.stored.name for filling in self.fillings)

    @property
    def kind(self) -> str:
        return self.layout.words

    @property
    def codes(self) -> QuantizedWeight:
        return self.weight

    def packed(self) -> PackedWeight | QuantizedWeight | None:
        if not self.weight.is_packed or self.order is not None:
            return None
        return self.floats or self.weight

    def checkpoint_tensors(self) -> dict[str, Destination]:
        return {name: place for filling in self.fillings for name, place in filling.places().items()}

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.floats is not None:
            return packed_linear(self._ordered(x), self.floats, bias)
        return quantized_linear(self._ordered(x), self.weight, bias)

    def product_with_adapters(
        self, x: torch.Tensor, bias: torch.Tensor | None, first_column: int, slice_sizes: Sequence[int], lora: LoRABatch
    ) -> torch.Tensor:
        if self.order is None:
            if self.floats is not None:
                return lora_linear(x, self.floats, lora.tables, first_column, slice_sizes, lora.segments, bias)
            return quantized_lora_linear(x, self.weight, lora.tables, first_column, slice_sizes, lora.segments, bias)
        return updated(partial(self.product, x, None), x, lora.tables, first_column, slice_sizes, lora.segments, bias)

    def embed(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = quantized_embedding(token_ids, self.weight, dtype)
        if self.order is None:
            return rows
        return torch.empty_like(rows).index_copy_(1, self.order, rows)

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.floats is not None:
            return float32_linear(self._ordered(x), self.floats, out)
        y = self.product(x, None).float()
        return y if out is None else out.copy_(y)

    def readable(self) -> None:
        return None

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else x.index_select(1, self.order)


@dataclass(frozen=True)
class DequantizedWeight(FloatWeight):
    """Linears of a GGUF file that are stored as floats here. coded: how the file has them."""

    coded: Sequence[QuantizedPart]

    def checkpoint_tensors(self) -> dict[str, Destination]:
        return {
            f"{part.stored.name}.{suffix}": BlockRows(self.weight, part.stored.first, part.scheme.type_name, stored)
            for part in self.coded
            if isinstance(part.scheme, GGMLBlocks)
            for suffix, stored in part.tensors.items()
        }


@dataclass(frozen=True)
class BlockRows:
    """The rows of a weight of floats from `first` on, whose tensor `stored` in the file is blocks of a type of ggml."""

    weight: PackedWeight
    first: int
    type_name: str
    stored: StoredTensor
    dtypes: frozenset[torch.dtype] = frozenset({torch.uint8})

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.stored.shape)

    def copy_(self, values: torch.Tensor, /) -> None:
        for begin in range(0, len(values), _ROWS_AT_ONCE):
            rows = dequantize(TYPES[self.type_name], values[begin : begin + _ROWS_AT_ONCE].numpy())
            self.weight.copy_rows(self.first + begin, torch.from_numpy(rows))


_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class StackedWeight:
    """Weights that are stored in different ways. The outputs of one follow the outputs of another."""

    weights: Sequence[LinearWeight]

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        num_bytes: Counter[str] = Counter()
        for weight in self.weights:
            num_bytes.update(weight.bytes_by_kind)
        return dict(num_bytes)

    @property
    def switches(self) -> Sequence[WeightSwitch]:
        return [switch for weight in self.weights for switch in weight.switches]

    def packed(self) -> None:
        return None

    def checkpoint_tensors(self) -> dict[str, Destination]:
        return {name: place for weight in self.weights for name, place in weight.checkpoint_tensors().items()}

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = torch.cat([weight.product(x, None) for weight in self.weights], dim=1)
        return y if bias is None else y.add_(bias)

    def product_with_adapters(
        self, x: torch.Tensor, bias: torch.Tensor | None, first_column: int, slice_sizes: Sequence[int], lora: LoRABatch
    ) -> torch.Tensor:
        return updated(partial(self.product, x, None), x, lora.tables, first_column, slice_sizes, lora.segments, bias)


@dataclass(frozen=True)
class CodedExperts:
    """Weights of experts that are codes. tensors: the places of the checkpoint's tensors."""

    weight: PackedExperts
    layout: Layout
    tensors: dict[str, Destination]

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        return {self.layout.words: self.weight.nbytes}

    @property
    def switches(self) -> Sequence[WeightSwitch]:
        return ()

    def checkpoint_tensors(self) -> dict[str, Destination]:
        return self.tensors
