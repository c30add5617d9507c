"""Adapters as codes: their sizes, their errors, and that a row's codes depend on the row alone."""

from __future__ import annotations

import pytest
import torch

from multilora_kernels.adapter_codes import CODE_BITS, a_bytes, b_bytes, dequantize_a, dequantize_b
from multilora_kernels.adapter_quantization import quantize_a, quantize_b, reference_a, reference_b
from multilora_wire.pieces import stored_pieces
from multilora_wire.sites import SitePart, WireModule

BITS = list(CODE_BITS.values())
STORED = {8: "int8", 4: "int4"}
SHAPES = [(1, 1, 1), (5, 15, 17), (8, 576, 192), (17, 257, 33), (33, 64, 100), (256, 24, 8)]
"""Rank, inputs, outputs."""

LARGEST_ERROR = {8: 0.011, 4: 0.11}


def random_adapter(rank: int, in_features: int, out_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank * in_features + out_features)
    return torch.randn(rank, in_features, generator=generator), torch.randn(out_features, rank, generator=generator)


def stored_and_back(a: torch.Tensor, b: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    behind = torch.full((9,), 255, dtype=torch.uint8)
    stored_a, stored_b = torch.cat((quantize_a(a, bits), behind)), torch.cat((quantize_b(b, bits), behind))
    return dequantize_a(stored_a, *a.shape, bits), dequantize_b(stored_b, *b.shape, bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rank", "in_features", "out_features"), SHAPES)
def test_sizes_are_those_of_the_pieces(bits: int, rank: int, in_features: int, out_features: int) -> None:
    a, b = random_adapter(rank, in_features, out_features)
    sizes = [quantize_a(a, bits).numel(), quantize_b(b, bits).numel()]
    assert sizes == [a_bytes(rank, in_features, bits), b_bytes(out_features, rank, bits)]
    module = WireModule(1, "attn_q", 0, in_features, out_features, (SitePart(0, 0),))
    assert sizes == [piece.num_bytes for piece in stored_pieces(module, rank, False, STORED[bits])]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rank", "in_features", "out_features"), [*SHAPES, (16, 576, 1536), (64, 2048, 512)])
def test_the_error_of_the_update_has_a_bound(bits: int, rank: int, in_features: int, out_features: int) -> None:
    a, b = random_adapter(rank, in_features, out_features)
    stored_a, stored_b = stored_and_back(a, b, bits)
    error = torch.linalg.norm(stored_b @ stored_a - b @ a) / torch.linalg.norm(b @ a)
    assert error <= LARGEST_ERROR[bits]


@pytest.mark.parametrize("bits", BITS)
def test_no_value_is_further_off_than_half_a_step_or_than_where_codes_end(bits: int) -> None:
    a, _ = random_adapter(16, 300, 1)
    error, largest = (dequantize_a(quantize_a(a, bits), 16, 300, bits) - a).abs(), a.abs().amax(dim=1, keepdim=True)
    steps = {8: 127, 4: 8}[bits]
    assert bool((error <= (0.51 if bits == 8 else 1.5) * largest / steps).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", [0.0, 1e-35, 1e30])
def test_values_of_every_size_are_stored(bits: int, scale: float) -> None:
    a, b = random_adapter(8, 40, 24)
    stored_a, stored_b = stored_and_back(a * scale, b * scale, bits)
    for stored, sent in ((stored_a, a * scale), (stored_b, b * scale)):
        assert bool(torch.isfinite(stored).all())
        assert torch.linalg.norm(stored.double() - sent.double()) <= 0.1 * torch.linalg.norm(sent.double())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_floats_stay_finite(bits: int, sign: int) -> None:
    largest = torch.full((16, 16), sign * torch.finfo(torch.float32).max)
    for stored in stored_and_back(largest, largest, bits):
        assert bool((stored * sign >= 3.3e38).all())
        assert bool(torch.isfinite(stored).all())


@pytest.mark.parametrize("bits", BITS)
def test_a_row_of_a_and_sixteen_outputs_of_b_depend_on_nothing_else(bits: int) -> None:
    a, b = random_adapter(8, 100, 48)
    stored_a, stored_b = stored_and_back(a, b, bits)
    assert dequantize_a(quantize_a(a[3:4], bits), 1, 100, bits).equal(stored_a[3:4])
    assert dequantize_b(quantize_b(b[16:32], bits), 16, 8, bits).equal(stored_b[16:32])
    assert dequantize_b(quantize_b(b[21:22], bits), 1, 8, bits).equal(stored_b[21:22])


def tied_errors(rank: int, in_features: int) -> torch.Tensor:
    """Values of few steps, so that several scales often are as good as each other, and many lie between two codes."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-16, 17, (rank, in_features), generator=generator) / 16.0


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rank", "in_features", "out_features"), [*SHAPES, (64, 1536, 600)])
def test_compiled_codes_are_those_of_torch(bits: int, rank: int, in_features: int, out_features: int) -> None:
    adapters = [random_adapter(rank, in_features, out_features)]
    adapters += [tuple(values * scale for values in adapters[0]) for scale in (1e-38, 1e-41, 1e30, 1e38, -0.0)]
    adapters.append((tied_errors(rank, in_features), tied_errors(out_features, rank)))
    for a, b in adapters:
        a, b = a.nan_to_num(), b.nan_to_num()
        assert quantize_a(a, bits).equal(reference_a(a, bits))
        assert quantize_b(b, bits).equal(reference_b(b, bits))
