"""Synthetic batches and adapters for operators.

Memory that an operator must not read is NaN, and every offset that it must not follow points far outside the arena.
"""

from __future__ import annotations

import torch

from benchmarks.lora_workloads import LinearShape
from multilora_kernels.adapter_codes import BLOCK_COLUMNS, CODE_BITS, LANES, SCALE_BYTES, panel_bytes
from multilora_kernels.adapter_quantization import quantize_a, quantize_b
from multilora_kernels.tables import LoRATables

POPULARITIES = ("distinct", "identical", "uniform", "zipf", "skewed")
"""How the tokens of a batch choose their adapters: one each, all the same, about sqrt(n) equally popular ones, ever
rarer ones (1 / k^1.5), or one token of one adapter and the rest of another."""

NOWHERE = 1 << 50
"""An offset outside every arena: following it is an error."""


def choose_adapters(popularity: str, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Adapter of each token, [num_tokens] int64, shuffled; adapters are numbered from 0 without gaps in popularity."""
    probabilities = {
        "uniform": torch.ones(max(int(num_tokens**0.5), 1)),
        "zipf": torch.arange(1, num_tokens + 1).float().pow(-1.5),
    }
    if popularity in probabilities:
        return torch.multinomial(probabilities[popularity], num_tokens, replacement=True, generator=generator)
    adapters = {
        "distinct": torch.arange(num_tokens),
        "identical": torch.zeros(num_tokens, dtype=torch.int64),
        "skewed": (torch.arange(num_tokens) > 0).long(),
    }[popularity]
    return adapters[torch.randperm(num_tokens, generator=generator)]


def random_tables(
    shape: LinearShape,
    rank: torch.Tensor,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    shared_a: bool = False,
    magnitudes: bool = False,
    max_rank: int | None = None,
) -> LoRATables:
    """Adapters of one fused linear with the given ranks, scaled so that v and the update of y are of order one.

    rank: [max_loras, num_slices], int; 0 for an absent slice. shared_a: the slices of an adapter have one A.
    magnitudes: every second adapter has DoRA magnitudes. Weights lie between gaps of NaN at odd places; codes between
    gaps that are NaN as scales, of 16 to 48 bytes.
    """
    builder = _ArenaBuilder(dtype, generator)
    tables = torch.full((3, *rank.shape), NOWHERE, dtype=torch.int64)
    for lora_index, slice_index in rank.nonzero().tolist():
        r, out = int(rank[lora_index, slice_index]), shape.slice_sizes[slice_index]
        is_shared = shared_a and slice_index > 0 and bool(rank[lora_index, slice_index - 1] == r)
        a = tables[0, lora_index, slice_index - 1] if is_shared else builder.add_a(r, shape.in_features)
        m = builder.add_magnitude(out) if magnitudes and lora_index % 2 else -1
        tables[:, lora_index, slice_index] = torch.tensor([int(a), builder.add_b(out, r), m])
    return LoRATables(builder.arena(), rank.int(), tables[0], tables[1], tables[2], max_rank or int(rank.max()))


def random_expert_tables(
    rank: torch.Tensor,
    columns: tuple[int, int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    shared_a: bool = False,
) -> LoRATables:
    """Adapters of the experts of one layer, scaled and laid out as those of `random_tables`.

    rank: [max_loras, 3, num_experts] of gate, up and down; 0 for an absent expert. columns: the first of each of the
    three; other columns are absent. sizes: hidden size and inner size. shared_a: gate and up have one A where their
    ranks are equal.
    """
    builder, (hidden, inner) = _ArenaBuilder(dtype, generator), sizes
    num_columns = max(columns) + rank.shape[2] + 1
    ranks = torch.zeros(rank.shape[0], num_columns, dtype=torch.int32)
    tables = torch.full((3, *ranks.shape), NOWHERE, dtype=torch.int64)
    tables[2] = -1
    for lora_index, part, expert in rank.nonzero().tolist():
        r, (in_size, out_size) = int(rank[lora_index, part, expert]), (inner, hidden) if part == 2 else (hidden, inner)
        column, gate = columns[part] + expert, columns[0] + expert
        is_shared = shared_a and part == 1 and bool(ranks[lora_index, gate] == r)
        a = tables[0, lora_index, gate] if is_shared else builder.add_a(r, in_size)
        ranks[lora_index, column] = r
        tables[:2, lora_index, column] = torch.tensor([int(a), builder.add_b(out_size, r)])
    return LoRATables(builder.arena(), ranks, tables[0], tables[1], tables[2], max(1, int(rank.max())))


def reference_order(tables: LoRATables, out_features: torch.Tensor) -> LoRATables:
    """A copy of tables whose Bs have the order of a GPU, by plain PyTorch. out_features: of each column."""
    arena = tables.arena.clone()
    stored, bits = arena.view(torch.uint8), CODE_BITS[arena.dtype]
    for row, column in tables.rank.nonzero().tolist():
        rank, start = int(tables.rank[row, column]), int(tables.b_offset[row, column])
        size, num_panels = panel_bytes(rank, bits), -(-int(out_features[column]) // LANES)
        panels = stored[start : start + num_panels * size].view(num_panels, size)
        first = 0
        while first < size:
            columns = rank if bits == 8 else min(BLOCK_COLUMNS, rank - first // panel_bytes(BLOCK_COLUMNS, 4) * 16)
            codes = panels[:, first + SCALE_BYTES : first + panel_bytes(columns, bits)]
            codes.copy_(codes.view(num_panels, -1, LANES).mT.flatten(1).clone())
            first += panel_bytes(columns, bits)
    return tables._replace(arena=arena)


class _ArenaBuilder:
    """Appends random weights, of variance 1 / fan-in, after gaps; returns their offsets."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator) -> None:
        self._pieces: list[torch.Tensor] = []
        self._size = 0
        self._dtype = dtype
        self._has_codes = dtype in CODE_BITS
        self._generator = generator

    def add_a(self, rank: int, in_features: int) -> int:
        a = self._random(rank, in_features) * in_features**-0.5
        return self._add(quantize_a(a, self._dtype) if self._has_codes else a)

    def add_b(self, out_features: int, rank: int) -> int:
        b = self._random(out_features, rank) * rank**-0.5
        return self._add(quantize_b(b, self._dtype) if self._has_codes else b)

    def add_magnitude(self, out_features: int) -> int:
        magnitude = self._random(out_features)
        return self._add(magnitude.view(torch.uint8) if self._has_codes else magnitude)

    def arena(self) -> torch.Tensor:
        arena = torch.cat([*self._pieces, self._gap(5)])
        return arena.view(self._dtype) if self._has_codes else arena.to(self._dtype)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _add(self, weights: torch.Tensor) -> int:
        gap = self._gap(1 + len(self._pieces) % 3)
        self._pieces += [gap, weights.flatten()]
        self._size += gap.numel() + weights.numel()
        return self._size - weights.numel()

    def _gap(self, length: int) -> torch.Tensor:
        """`length` elements, or 16 * `length` bytes from a multiple of 16 on, whose bits are NaN as every float."""
        if self._has_codes:
            return torch.full((16 * length + -self._size % 16,), 255, dtype=torch.uint8)
        return torch.full((length,), torch.nan)
