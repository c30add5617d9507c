"""`LoRALinear` against W + B A written out, with DoRA magnitudes, biases and rows of the base model in one batch."""

from __future__ import annotations

import pytest
import torch
from support.gpu_path import kernels_by_plain_torch

from multilora_engine.batch.forward_batch import LoRABatch
from multilora_engine.models.linear import LoRALinear, bias_places, stored_parts
from multilora_engine.models.weights import FloatFormat, Placement
from multilora_kernels import LoRATables, lora_segments
from multilora_kernels.segments import rows_of
from multilora_wire.sites import AdapterSite

IN_FEATURES = 13
SLICE_SIZES = (5, 3, 7)
NAMES = ["q_proj", "k_proj", "v_proj"]
FIRST_SLICE = 2
MAX_RANK = 9
RANKS = [(1, 0, 4), (9, 9, 9), (0, 0, 0), (2, 3, 1)]
"""Of adapters 0 .. 3 in each slice."""
MAPPING = [1, -1, 0, 3, 3, -1, 2, 0, 1, 1, 1]


class Adapters:
    """Random adapters in an arena, and the dense weights each makes of a base weight."""

    def __init__(self, has_magnitude: bool, slice_sizes: tuple[int, ...] = SLICE_SIZES) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._parts: list[torch.Tensor] = []
        self.dense: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        shape = (len(RANKS), FIRST_SLICE + len(slice_sizes) + 1)
        self._rank = torch.zeros(shape, dtype=torch.int32)
        self._a, self._b = torch.full(shape, 10**9), torch.full(shape, 10**9)
        self._magnitude = torch.full(shape, -1)
        for lora_index, ranks in enumerate(RANKS):
            for s, (rank, size) in enumerate(zip(ranks, slice_sizes, strict=False)):
                self._add(lora_index, s, rank, size, has_magnitude and lora_index % 2 == 1)

    def tables(self) -> LoRATables:
        arena = torch.cat(self._parts)
        return LoRATables(arena, self._rank, self._a, self._b, self._magnitude, MAX_RANK)

    def _add(self, lora_index: int, s: int, rank: int, size: int, has_magnitude: bool) -> None:
        if not rank:
            return
        column = FIRST_SLICE + s
        a, b = self._random(rank, IN_FEATURES), self._random(size, rank)
        magnitude = 1 + self._random(size) / 2 if has_magnitude else torch.ones(size)
        self.dense[lora_index, s] = (b @ a, magnitude)
        self._rank[lora_index, column] = rank
        self._a[lora_index, column] = self._store(a)
        self._b[lora_index, column] = self._store(b)
        if has_magnitude:
            self._magnitude[lora_index, column] = self._store(magnitude)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)

    def _store(self, values: torch.Tensor) -> int:
        """Append to the arena, rows aligned as the packed form aligns them; returns the offset."""
        offset = sum(part.numel() for part in self._parts)
        self._parts += [values.flatten(), torch.full((-values.numel() % 32,), float("nan"))]
        return offset


def make_linear(has_bias: bool, slice_sizes: tuple[int, ...] = SLICE_SIZES) -> LoRALinear:
    placement = Placement(torch.float32, torch.float32, torch.device("cpu"))
    sites = [
        AdapterSite(f"layers.0.{name}", 0, IN_FEATURES, size, FIRST_SLICE + s)
        for s, (name, size) in enumerate(zip(NAMES, slice_sizes, strict=False))
    ]
    weight = FloatFormat(placement).linear(stored_parts(sites, NAMES[: len(sites)]), IN_FEATURES)
    linear = LoRALinear(sites, weight, placement.vectors(sum(slice_sizes)) if has_bias else None)
    generator = torch.Generator().manual_seed(1)
    weight.weight.copy_rows(0, torch.randn(sum(slice_sizes), IN_FEATURES, generator=generator))
    if linear.bias is not None:
        linear.bias.normal_(generator=generator)
    return linear


def dense(linear: LoRALinear) -> torch.Tensor:
    return torch.cat([place.tensor() for place in linear.weight.checkpoint_tensors().values()])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_magnitude", [False, True])
def test_each_row_gets_the_weights_of_its_own_adapter(has_bias: bool, has_magnitude: bool) -> None:
    linear, adapters = make_linear(has_bias), Adapters(has_magnitude)
    x = torch.randn(len(MAPPING), IN_FEATURES, generator=torch.Generator().manual_seed(2))
    mapping = torch.tensor(MAPPING)
    lora = LoRABatch(adapters.tables(), lora_segments(mapping, len(RANKS)), mapping)
    y = linear.forward(x, lora)
    for row, lora_index in enumerate(MAPPING):
        torch.testing.assert_close(y[row], expected_row(linear, adapters, x[row], lora_index), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_magnitude", [False, True])
def test_a_gpu_activates_gate_and_up_of_each_row_with_its_own_adapter(
    monkeypatch: pytest.MonkeyPatch, has_magnitude: bool
) -> None:
    kernels_by_plain_torch(monkeypatch)
    sizes = (6, 6)
    linear, adapters = make_linear(has_bias=False, slice_sizes=sizes), Adapters(has_magnitude, sizes)
    x = torch.randn(len(MAPPING), IN_FEATURES, generator=torch.Generator().manual_seed(2))
    mapping = torch.tensor(MAPPING)
    y = linear.forward_activated(x, LoRABatch(adapters.tables(), rows_of(mapping), mapping), "silu")
    for row, lora_index in enumerate(MAPPING):
        gate, up = expected_row(linear, adapters, x[row], lora_index).chunk(2)
        torch.testing.assert_close(y[row], gate * gate.sigmoid() * up, atol=1e-4, rtol=1e-4)


def expected_row(linear: LoRALinear, adapters: Adapters, x: torch.Tensor, lora_index: int) -> torch.Tensor:
    """m * ((W + B A) x) + bias, slice by slice."""
    parts = []
    for s, weight in enumerate(dense(linear).split(linear.slice_sizes)):
        update, magnitude = adapters.dense.get((lora_index, s), (torch.zeros_like(weight), torch.ones(len(weight))))
        parts.append(magnitude * ((weight + update) @ x))
    return torch.cat(parts) if linear.bias is None else torch.cat(parts) + linear.bias


def test_without_adapters_it_is_a_linear() -> None:
    linear = make_linear(has_bias=True)
    x = torch.randn(4, IN_FEATURES)
    torch.testing.assert_close(linear.forward(x, None), x @ dense(linear).T + linear.bias)


def test_weights_lie_in_memory_as_they_are_asked_for():
    placement = Placement(torch.float32, torch.bfloat16, torch.device("cpu"))
    first, second = placement.weight(100, 64), placement.weight(50, 64)
    assert second.data.data_ptr() == first.data.data_ptr() + first.data.nbytes


def test_checkpoint_tensors_are_places_in_the_fused_weights() -> None:
    linear = make_linear(has_bias=True)
    assert linear.bias is not None
    parts = linear.weight.parts
    tensors = linear.weight.checkpoint_tensors() | bias_places(linear.bias, parts)
    tensors["k_proj.weight"].copy_(torch.full((3, IN_FEATURES), 3.0))
    tensors["v_proj.bias"].copy_(torch.full((7,), 4.0))
    assert set(tensors) == {f"{name}.{kind}" for name in NAMES for kind in ("weight", "bias")}
    assert dense(linear)[5:8].eq(3.0).all()
    assert dense(linear).eq(3.0).sum() == 3 * IN_FEATURES
    assert linear.bias[8:].eq(4.0).all()
