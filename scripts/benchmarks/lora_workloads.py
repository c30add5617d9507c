"""Workloads of bench_kernels and of the GPU's report: batches over a model's linears.

A step applies the adapters of all linears of all layers once. Layers have weights of their own, as in a model, so that
no step finds the last one's adapters in a cache by accident of the benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from multilora_kernels import (
    CodeType,
    HugePages,
    LoRASegments,
    LoRATables,
    PackedWeight,
    QuantizedWeight,
    lora_apply,
    lora_linear,
    lora_segments,
    packed_linear,
)

VOCAB_SIZE = 128256
"""Of the models of one and of eight billion parameters."""

BLOCK_SIZE = 16
"""Tokens of a block of the KV cache."""

Step = Callable[[], None]


@dataclass(frozen=True)
class LinearShape:
    """One fused linear: `in_features`, shared by its slices, and the width of each slice."""

    in_features: int
    slice_sizes: tuple[int, ...]

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return len(self.slice_sizes)

    @property
    def out_features(self) -> int:
        """Width of the whole output."""
        return sum(self.slice_sizes)


@dataclass(frozen=True)
class Model:
    """The linears of one layer: the fused q|k|v, o, gate|up, down."""

    name: str
    linears: tuple[LinearShape, ...]
    num_layers: int

    @property
    def num_slices(self) -> int:
        """Slices of one layer."""
        return sum(linear.num_slices for linear in self.linears)

    @property
    def values_per_rank(self) -> int:
        """Elements of one layer's A and B for each rank."""
        return sum(linear.in_features * linear.num_slices + linear.out_features for linear in self.linears)


def llama(name: str, hidden: int, kv: int, ffn: int, num_layers: int) -> Model:
    """A Llama-like model by its sizes."""
    shapes = [(hidden, (hidden, kv, kv)), (hidden, (hidden,)), (hidden, (ffn, ffn)), (ffn, (hidden,))]
    return Model(name, tuple(LinearShape(*shape) for shape in shapes), num_layers)


DEFAULT_MODEL = llama("135M", hidden=576, kv=192, ffn=1536, num_layers=30)
ONE_BILLION = llama("1B", hidden=2048, kv=512, ffn=8192, num_layers=16)
EIGHT_BILLION = llama("8B", hidden=4096, kv=1024, ffn=14336, num_layers=1)


@dataclass(frozen=True)
class Workload:
    """A batch: `num_tokens` tokens, token t uses adapter t % num_adapters, adapter l has rank ranks[l % len(ranks)]."""

    model: Model
    num_tokens: int
    num_adapters: int
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name for tables and plots."""
        adapters = "distinct" if self.num_adapters == self.num_tokens else f"of {self.num_adapters}"
        return f"{self.model.name} {self.num_tokens} rows {adapters} rank {'/'.join(map(str, self.ranks))}"

    @property
    def adapter_ranks(self) -> list[int]:
        """Rank of each adapter."""
        return [self.ranks[lora_index % len(self.ranks)] for lora_index in range(self.num_adapters)]

    def num_bytes(self, lora_dtype: torch.dtype, dtype: torch.dtype) -> int:
        """Least memory traffic of a step's updates alone: every adapter and x once, y read and written."""
        features = sum(linear.in_features + 2 * linear.out_features for linear in self.model.linears)
        activations = self.model.num_layers * self.num_tokens * features * dtype.itemsize
        return self.adapter_bytes(lora_dtype) + activations

    def adapter_bytes(self, lora_dtype: torch.dtype) -> int:
        """Size of all adapters."""
        return self.model.num_layers * sum(self.adapter_ranks) * self.model.values_per_rank * lora_dtype.itemsize

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Size of the base linears' weights."""
        return self._num_weights * dtype.itemsize

    def weight_flops(self) -> int:
        """Multiplications and additions of the base linears of a step."""
        return 2 * self.num_tokens * self._num_weights

    @property
    def _num_weights(self) -> int:
        return self.model.num_layers * sum(linear.in_features * linear.out_features for linear in self.model.linears)

    def num_flops(self) -> int:
        """Multiplications and additions of a step's updates."""
        ranks = self.adapter_ranks
        token_ranks = sum(ranks[token % self.num_adapters] for token in range(self.num_tokens))
        return 2 * token_ranks * self.model.values_per_rank * self.model.num_layers


class Batch:
    """A workload's tensors, and the contestants' steps over them."""

    def __init__(self, workload: Workload, lora_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
        model = workload.model
        self.workload, self.dtype = workload, dtype
        # Once: an engine does not look for its linears in every step either.
        self.linears = _linears(model)
        mapping = (torch.arange(workload.num_tokens) % workload.num_adapters).to(device)
        self.segments: LoRASegments = lora_segments(mapping, workload.num_adapters)
        self.tables: LoRATables = _tables(workload, lora_dtype, device)
        self.x = [torch.randn(workload.num_tokens, s.in_features, device=device).to(dtype) for s in model.linears]
        self.y = [torch.zeros(workload.num_tokens, s.out_features, device=device, dtype=dtype) for s in model.linears]

    def update(self) -> None:
        """The updates alone: one `lora_apply` a linear."""
        for column, i, shape in self.linears:
            lora_apply(self.x[i], self.y[i], self.tables, column, shape.slice_sizes, self.segments)

    def base_linears(self) -> tuple[Step, Step]:
        """The base linears, and the same with their updates: one `packed_linear`, one `lora_linear` each."""
        pages = HugePages()
        weights = [self._weight(shape, pages) for _, _, shape in self.linears]

        def linears() -> None:
            for (_, i, _), weight in zip(self.linears, weights, strict=True):
                packed_linear(self.x[i], weight)

        def lora_linears() -> None:
            for (column, i, shape), weight in zip(self.linears, weights, strict=True):
                lora_linear(self.x[i], weight, self.tables, column, shape.slice_sizes, self.segments)

        return linears, lora_linears

    def _weight(self, shape: LinearShape, pages: HugePages) -> PackedWeight:
        device = self.x[0].device
        weight = PackedWeight.empty(shape.out_features, shape.in_features, self.dtype, device, self.dtype, pages)
        weight.data.fill_(0.02)
        return weight


def _linears(model: Model) -> list[tuple[int, int, LinearShape]]:
    """First slice, place in the layer and shape of each linear of the model."""
    linears, column = [], 0
    for _ in range(model.num_layers):
        for i, shape in enumerate(model.linears):
            linears.append((column, i, shape))
            column += shape.num_slices
    return linears


def _tables(workload: Workload, lora_dtype: torch.dtype, device: str) -> LoRATables:
    """Adapters one after the other, as the engine packs them: rows of A then B, on 64-byte boundaries."""
    ranks, model = workload.adapter_ranks, workload.model
    align = 64 // lora_dtype.itemsize
    shape = (workload.num_adapters, model.num_layers * model.num_slices)
    a_offset, b_offset = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    slices = [(linear.in_features, size) for linear in model.linears for size in linear.slice_sizes]
    end = 0
    for lora_index, rank in enumerate(ranks):
        for column, (in_features, size) in enumerate(slices * model.num_layers):
            a_offset[lora_index, column] = end
            b_offset[lora_index, column] = end + rank * in_features
            end += math.ceil(rank * (in_features + size) / align) * align
    rank_table = torch.tensor(ranks, dtype=torch.int32).unsqueeze(1).repeat(1, shape[1])
    # The arena is allocated as the engine's is.
    on_cpu = device == "cpu"
    arena = HugePages().zeros((end,), lora_dtype) if on_cpu else torch.empty(end, device=device, dtype=lora_dtype)
    arena.normal_(std=0.02)
    absent = torch.full(shape, -1)
    return LoRATables(
        arena,
        rank_table.to(device),
        a_offset.to(device),
        b_offset.to(device),
        absent.to(device),
        max_rank=max(ranks),
    )


def fill_with_codes(weight: QuantizedWeight, device: torch.device, scale: float = 1.0) -> None:
    """Random codes with zeros in the middle of their range, as symmetric checkpoints have them, and one scale."""
    out_features, in_features = weight.shape
    codes = torch.randint(0, 8, (out_features, in_features), dtype=torch.uint8, device=device)
    scales = torch.full((out_features, weight.num_groups), scale, device=device)
    middle = 1 << (weight.code_type.bits - 1)
    zeros = None if weight.code_type is CodeType.FP8 else torch.full_like(scales, middle, dtype=torch.uint8)
    weight.copy_rows(0, codes, scales, zeros)
