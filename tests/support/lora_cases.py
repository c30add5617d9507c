"""Batches for the operators and the right results, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from multilora_kernels import LoRASegments, LoRATables, lora_segments, reference
from support.synthetic_batches import LinearShape, choose_adapters, random_tables

Struct = TypeVar("Struct", LoRATables, LoRASegments)

# (rtol, atol) by the dtype of the activations; accumulation is float32 in every case.
TOLERANCES = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}

CODES = [torch.int8, torch.float8_e4m3fn, torch.uint8]
"""Dtypes of arenas of codes."""

STORED = [*TOLERANCES, *CODES]
"""Dtypes of arenas."""

FUSED = LinearShape(in_features=72, slice_sizes=(56, 24, 24))
ODD = LinearShape(in_features=77, slice_sizes=(33, 1, 18))
MIXED_RANKS = (1, 3, 8, 0, 17, 64, 256, 5)


@dataclass(frozen=True)
class Case:
    """One call of each operator: `x` of base tokens is NaN, `y` is the output of the base layer."""

    shape: LinearShape
    tables: LoRATables
    mapping: torch.Tensor
    segments: LoRASegments
    x: torch.Tensor
    y: torch.Tensor

    def touched(self) -> torch.Tensor:
        """[num_slices, num_tokens]: whether the token's adapter has that slice."""
        rank = self.tables.rank.cpu()[self.mapping.cpu().clamp(min=0)].T
        return (rank > 0) & (self.mapping.cpu() >= 0)

    def expected_v(self) -> torch.Tensor:
        on_cpu = self.to("cpu")
        return reference.lora_shrink(on_cpu.x.double(), on_cpu.tables, 0, self.shape.num_slices, on_cpu.segments)

    def expected_y(self, v: torch.Tensor) -> torch.Tensor:
        on_cpu = self.to("cpu")
        y = on_cpu.y.double()
        reference.lora_expand(v.cpu().double(), y, on_cpu.tables, 0, self.shape.slice_sizes, on_cpu.segments)
        return y

    def to(self, device: str) -> Case:
        return Case(
            self.shape,
            _to(self.tables, device),
            self.mapping.to(device),
            _to(self.segments, device),
            self.x.to(device),
            self.y.to(device),
        )

    def with_mapping(self, mapping: torch.Tensor, tokens: torch.Tensor) -> Case:
        """The same adapters on a batch of some of the tokens."""
        segments = lora_segments(mapping, self.tables.rank.shape[0])
        return Case(self.shape, self.tables, mapping, segments, self.x[tokens], self.y[tokens])


def make_case(
    popularity: str = "zipf",
    num_tokens: int = 10,
    shape: LinearShape = FUSED,
    ranks: tuple[int, ...] = MIXED_RANKS,
    lora_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    base_share: float = 0.2,
    seed: int = 0,
    **tables: bool,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    mapping = choose_adapters(popularity, num_tokens, generator)
    max_loras = int(mapping.max()) + 1
    mapping[torch.rand(num_tokens, generator=generator) < base_share] = -1
    rank = torch.tensor(ranks)[torch.randint(len(ranks), (max_loras, shape.num_slices), generator=generator)]
    if tables.get("shared_a"):
        rank = rank[:, :1].repeat(1, shape.num_slices)
    x = torch.randn(num_tokens, shape.in_features, generator=generator).to(dtype)
    x[mapping < 0] = torch.nan
    y = torch.randn(num_tokens, shape.out_features, generator=generator).to(dtype)
    adapters = random_tables(shape, rank, lora_dtype, generator, max_rank=max(ranks), **tables)
    return Case(shape, adapters, mapping, lora_segments(mapping, max_loras), x, y)


def _to(struct: Struct, device: str) -> Struct:
    return struct._make(value.to(device) if isinstance(value, torch.Tensor) else value for value in struct)
