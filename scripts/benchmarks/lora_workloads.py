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
    ExpertLoRA,
    HugePages,
    LoRASegments,
    LoRATables,
    PackedExperts,
    PackedWeight,
    QuantizedWeight,
    activation_dtype,
    expert_mlp,
    lora_apply,
    lora_linear,
    packed_linear,
    route,
    step_segments,
)

VOCAB_SIZE = 128256
"""Of the models of one and of eight billion parameters."""

BLOCK_SIZE = 64
"""Tokens of a block of a GPU's KV cache."""

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
        self.tables: LoRATables = _tables(workload, lora_dtype, device)
        # Few rows are those of a step of decodes.
        self.segments: LoRASegments = step_segments(mapping, self.tables, has_prompts=False)
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


@dataclass(frozen=True)
class Mixture:
    """The experts of one layer, and how many layers are computed, each with weights of its own."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    num_layers: int = 2

    @property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.inner


OLMOE = Mixture("OLMoE-1B-7B", num_experts=64, top_k=8, hidden=2048, inner=1024)
QWEN3_MOE = Mixture("Qwen3-30B-A3B", num_experts=128, top_k=8, hidden=2048, inner=768)

_GROUP_SIZE = 128
"""Inputs that share a scale of w4a16 weights."""


class ExpertBatch:
    """Experts of bfloat16 or of w4a16, tokens that choose among them at random, and an adapter of all experts each.

    adapters: the tokens' adapters are numbers 0 .. num_adapters - 1 in turn, all of `rank`.
    """

    def __init__(
        self, mixture: Mixture, num_tokens: int, has_codes: bool, device: str, num_adapters: int, rank: int = 16
    ) -> None:
        self.mixture, self.rank, self._has_codes = mixture, rank, has_codes
        self._device = torch.device(device)
        self._dtype = activation_dtype(torch.bfloat16, self._device)
        pages = HugePages()
        self._layers = [
            (
                self._experts(2 * mixture.inner, mixture.hidden, pages),
                self._experts(mixture.hidden, mixture.inner, pages),
            )
            for _ in range(mixture.num_layers)
        ]
        self._x = torch.randn(num_tokens, mixture.hidden, device=device).to(self._dtype)
        logits = torch.randn(mixture.num_layers, num_tokens, mixture.num_experts, device=device)
        self._routes = [route(of_layer, mixture.top_k, True) for of_layer in logits]
        self._mapping = torch.arange(num_tokens, device=device) % num_adapters
        self._tables = self._adapters(num_adapters)

    def base(self) -> None:
        """The experts of all layers."""
        for (gate_up, down), (expert_ids, weights) in zip(self._layers, self._routes, strict=True):
            expert_mlp(self._x, expert_ids, weights, gate_up, down)

    def with_adapters(self) -> None:
        """The same with each token's adapter."""
        num_experts = self.mixture.num_experts
        for layer, ((gate_up, down), (expert_ids, weights)) in enumerate(zip(self._layers, self._routes, strict=True)):
            first = 3 * num_experts * layer
            columns = (first, first + num_experts, first + 2 * num_experts)
            lora = ExpertLoRA(self._tables, self._mapping, *columns)
            expert_mlp(self._x, expert_ids, weights, gate_up, down, lora=lora)

    @property
    def base_bytes(self) -> float:
        """Bytes of the experts that are used."""
        bits = 4 + 16 / _GROUP_SIZE if self._has_codes else 16
        used = sum(len(expert_ids.unique()) for expert_ids, _ in self._routes)
        return used * self.mixture.expert_weights * bits / 8

    @property
    def adapter_bytes(self) -> float:
        """Bytes of the adapters of the experts that are used."""
        used = 0
        for expert_ids, _ in self._routes:
            pairs = self._mapping[:, None] * self.mixture.num_experts + expert_ids
            used += len(pairs.unique())
        return used * self._values_of_update * torch.bfloat16.itemsize

    @property
    def base_flops(self) -> float:
        """Multiplications and additions of the experts."""
        return 2.0 * self._num_pairs * self.mixture.expert_weights

    @property
    def adapter_flops(self) -> float:
        """Multiplications and additions of the adapters."""
        return 2.0 * self._num_pairs * self._values_of_update

    @property
    def _num_pairs(self) -> int:
        return self.mixture.num_layers * len(self._x) * self.mixture.top_k

    @property
    def _values_of_update(self) -> int:
        return 3 * self.rank * (self.mixture.hidden + self.mixture.inner)

    def _experts(self, out_features: int, in_features: int, pages: HugePages) -> PackedExperts:
        shape = (self.mixture.num_experts, out_features, in_features)
        if not self._has_codes:
            experts = PackedExperts.empty(*shape, torch.bfloat16, self._device, torch.bfloat16, pages)
            assert isinstance(experts.weight, PackedWeight)
            experts.weight.data.fill_(0.02)
            return experts
        experts = PackedExperts.of_codes(
            *shape,
            CodeType.INT4,
            min(_GROUP_SIZE, in_features),
            torch.bfloat16,
            self._device,
            compute_dtype=self._dtype,
            may_round=self._dtype == torch.float32,
            pages=pages,
        )
        for expert in range(shape[0]):
            weight = experts.expert(expert)
            assert isinstance(weight, QuantizedWeight)
            fill_with_codes(weight, self._device, 0.01)
        return experts

    def _adapters(self, num_adapters: int) -> LoRATables:
        """Adapters one after another: for each layer and part all A and B, on 64-byte boundaries."""
        mixture, rank = self.mixture, self.rank
        inputs = torch.tensor([mixture.hidden, mixture.hidden, mixture.inner]).repeat_interleave(mixture.num_experts)
        outputs = torch.tensor([mixture.inner, mixture.inner, mixture.hidden]).repeat_interleave(mixture.num_experts)
        sizes = (rank * torch.stack((inputs, outputs))).repeat(1, mixture.num_layers * num_adapters)
        assert not (sizes % 32).any(), "matrices fill whole lines"
        ends = sizes.T.flatten().cumsum(0)
        starts = (ends - sizes.T.flatten()).view(num_adapters, -1, 2)
        on_cpu = self._device.type == "cpu"
        shape = (int(ends[-1]),)
        arena = (
            HugePages().zeros(shape, torch.bfloat16)
            if on_cpu
            else torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        )
        arena.fill_(0.02)
        a_offset, b_offset = (part.contiguous().to(self._device) for part in starts.unbind(2))
        ranks = torch.full(a_offset.shape, rank, dtype=torch.int32, device=self._device)
        return LoRATables(arena, ranks, a_offset, b_offset, torch.full_like(a_offset, -1), rank)


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
