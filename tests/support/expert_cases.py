"""Mixtures of experts for the operators, and the right results in float64, token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from multilora_kernels import CodeType, ExpertLoRA, HugePages, PackedExperts, expert_mlp, reference
from multilora_kernels.adapter_order import has_own_order
from support.synthetic_batches import random_expert_tables, reference_order

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 77, 33, 7, 3
"""Sizes that no vector, panel or word of codes divides."""

RANKS = (0, 1, 3, 8, 17)
"""Of the experts of an adapter, each on its own; 0 for an expert that it lacks."""

KINDS = [
    (CodeType.INT4, False),
    (CodeType.INT4, True),
    (CodeType.INT8, False),
    (CodeType.INT8, True),
    (CodeType.FP8, False),
]
"""Codes, and whether they have zeros."""


@dataclass(frozen=True)
class ExpertCase:
    """One call of `expert_mlp`. gate_up_values, down_values: what the stored weights mean, in float64."""

    x: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor
    gate_up: PackedExperts
    down: PackedExperts
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    clamp_limit: float = 0.0
    lora: ExpertLoRA | None = None

    def result(self) -> torch.Tensor:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.lora is not None and has_own_order(self.lora.tables.arena):
            num_experts, hidden, inner = self.down.shape
            columns = torch.arange(self.lora.tables.rank.shape[1])
            is_down = (columns >= self.lora.down_column) & (columns < self.lora.down_column + num_experts)
            tables = reference_order(self.lora.tables, torch.where(is_down, hidden, inner))
            fields["lora"] = self.lora._replace(tables=tables)
        return expert_mlp(**fields)

    def of(self, tokens: torch.Tensor) -> ExpertCase:
        """The same experts and adapters on a batch of some of the tokens."""
        lora = self.lora and self.lora._replace(mapping=self.lora.mapping[tokens])
        batch = (self.x[tokens], self.expert_ids[tokens], self.weights[tokens])
        return replace(self, x=batch[0], expert_ids=batch[1], weights=batch[2], lora=lora)

    def expected(self) -> torch.Tensor:
        """A loop over tokens and their experts, [num_tokens, H] float64."""
        gate_up, down = (values_of(experts).double().cpu() for experts in (self.gate_up, self.down))
        inner, rows = down.shape[2], []
        for token, x in enumerate(self.x.double().cpu()):
            y = torch.zeros(down.shape[1], dtype=torch.float64)
            for weight, expert in zip(self.weights[token].tolist(), self.expert_ids[token].tolist(), strict=True):
                both = gate_up[expert] @ x
                gate, up = both[:inner], both[inner:]
                if self.lora is not None:
                    gate = gate + self._update(token, self.lora.gate_column + expert, x, inner)
                    up = up + self._update(token, self.lora.up_column + expert, x, inner)
                if self.gate_up_bias is not None:
                    bias = self.gate_up_bias[expert].double().cpu()
                    gate, up = gate + bias[:inner], up + bias[inner:]
                if self.clamp_limit > 0:
                    gate, up = gate.clamp(max=self.clamp_limit), up.clamp(-self.clamp_limit, self.clamp_limit)
                    h = (up + 1) * gate / (1 + (-1.702 * gate).exp())
                else:
                    h = up * gate / (1 + (-gate).exp())
                out = down[expert] @ h
                if self.lora is not None:
                    out = out + self._update(token, self.lora.down_column + expert, h, len(out))
                if self.down_bias is not None:
                    out = out + self.down_bias[expert].double().cpu()
                y += weight * out
            rows.append(y)
        return torch.stack(rows) if rows else self.x.double().cpu()

    def _update(self, token: int, column: int, x: torch.Tensor, out_size: int) -> torch.Tensor:
        assert self.lora is not None
        tables, lora_index = self.lora.tables, int(self.lora.mapping[token])
        if lora_index < 0 or tables.rank[lora_index, column] == 0:
            return torch.zeros(out_size, dtype=torch.float64)
        a = reference.matrix_a(tables, lora_index, column, len(x)).double().cpu()
        return reference.matrix_b(tables, lora_index, column, out_size).double().cpu() @ (a @ x)


def values_of(experts: PackedExperts) -> torch.Tensor:
    """What the stored weights mean, [num_experts, out_features, in_features]."""
    num_experts, out_features, _ = experts.shape
    return torch.stack([experts.expert(e).rows(0, out_features) for e in range(num_experts)])


def float_experts(
    num_experts: int,
    out_features: int,
    in_features: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PackedExperts:
    """Weights of variance 1 / in_features."""
    shape = (num_experts, out_features, in_features)
    experts = PackedExperts.empty(*shape, dtype, torch.device(device), compute_dtype, HugePages())
    rows = torch.randn(shape, generator=generator) * in_features**-0.5
    for e in range(num_experts):
        half = out_features // 2
        experts.expert(e).copy_rows(half, rows[e, half:].to(device))
        experts.expert(e).copy_rows(0, rows[e, :half].to(device))
    return experts


def coded_experts(
    num_experts: int,
    out_features: int,
    in_features: int,
    generator: torch.Generator,
    kind: tuple[CodeType, bool],
    group_size: int,
    compute_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    may_round: bool = False,
) -> PackedExperts:
    """Weights of about in_features ** -0.5. Of several experts, only the last one has zeros that differ, if any."""
    code_type, has_zeros = kind
    group_size = min(group_size, in_features)
    experts = PackedExperts.of_codes(
        num_experts,
        out_features,
        in_features,
        code_type,
        group_size,
        torch.bfloat16,
        torch.device(device),
        compute_dtype=compute_dtype,
        may_round=may_round,
    )
    spread = 64 if code_type is CodeType.FP8 else (1 << code_type.bits) / 4
    for e in range(num_experts):
        codes = torch.randint(1 << code_type.bits, (out_features, in_features), generator=generator).to(torch.uint8)
        groups = (out_features, -(-in_features // group_size))
        scales = torch.rand(groups, generator=generator).add(0.5) * in_features**-0.5 / spread
        zeros = torch.full(groups, 1 << (code_type.bits - 1), dtype=torch.uint8)
        if code_type is CodeType.FP8:
            codes[codes & 0x7F == 0x7F] = 1
        elif has_zeros and e == num_experts - 1:
            zeros = torch.randint(1 << code_type.bits, groups, generator=generator).to(torch.uint8)
        half = out_features // 2
        for rows in (slice(0, half), slice(half, out_features)):
            stored_zeros = None if code_type is CodeType.FP8 else zeros[rows].to(device)
            experts.expert(e).copy_rows(
                rows.start, codes[rows].to(device), scales[rows].bfloat16().to(device), stored_zeros
            )
    return experts


def make_expert_case(
    num_tokens: int = 11,
    hidden: int = HIDDEN,
    inner: int = INNER,
    num_experts: int = NUM_EXPERTS,
    top_k: int = TOP_K,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
    lora_dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    kind: tuple[CodeType, bool] | None = None,
    group_size: int = 32,
    may_round: bool = False,
    num_loras: int = 3,
    ranks: tuple[int, ...] = RANKS,
    has_biases: bool = False,
    clamp_limit: float = 0.0,
    shared_a: bool = False,
    compute_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> ExpertCase:
    """Random experts, adapters and tokens; memory that no operator may read is NaN.

    lora_dtype: None without adapters. kind: of codes; None for floats. compute_dtype: of floats, if it is not `dtype`.
    """
    generator = torch.Generator().manual_seed(seed)

    def experts(out_features: int, in_features: int) -> PackedExperts:
        shape = (num_experts, out_features, in_features)
        if kind is not None:
            return coded_experts(*shape, generator, kind, group_size, dtype, device, may_round)
        return float_experts(*shape, generator, weight_dtype, compute_dtype or dtype, device)

    gate_up, down = experts(2 * inner, hidden), experts(hidden, inner)
    wide = torch.full((num_tokens, hidden + 9), torch.nan)
    wide[:, :hidden] = torch.randn(num_tokens, hidden, generator=generator)
    expert_ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k].int().contiguous()
    weights = torch.rand(num_tokens, top_k, generator=generator)
    biases = [torch.randn(num_experts, size, generator=generator) for size in (2 * inner, hidden)]
    lora = None
    if lora_dtype is not None:
        rank = torch.tensor(ranks)[torch.randint(len(ranks), (num_loras, 3, num_experts), generator=generator)]
        columns = (1, num_experts + 3, 2 * num_experts + 3)
        tables = random_expert_tables(rank, columns, (hidden, inner), lora_dtype, generator, shared_a=shared_a)
        mapping = torch.randint(-1, num_loras, (num_tokens,), generator=generator)
        tables = tables._make(x.to(device) if isinstance(x, torch.Tensor) else x for x in tables)
        lora = ExpertLoRA(tables, mapping.to(device), *columns)
    return ExpertCase(
        wide.to(dtype).to(device)[:, :hidden],
        expert_ids.to(device),
        weights.to(device),
        gate_up,
        down,
        *(bias.to(dtype).to(device) if has_biases else None for bias in biases),
        clamp_limit,
        lora,
    )
