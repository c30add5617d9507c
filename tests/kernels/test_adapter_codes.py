"""Adapters as codes: their sizes, their errors, and that a row's codes depend on the row alone."""

from __future__ import annotations

import pytest
import torch

from multilora_kernels.adapter_codes import (
    CODE_BITS,
    SCALE_BYTES,
    a_bytes,
    a_header_bytes,
    b_bytes,
    dequantize_a,
    dequantize_b,
)
from multilora_kernels.adapter_quantization import quantize_a, quantize_b, reference_a, reference_b
from multilora_wire.pieces import stored_pieces
from multilora_wire.sites import SitePart, WireModule

FP8 = torch.float8_e4m3fn
STORED = {torch.int8: "int8", FP8: "fp8", torch.uint8: "int4"}
SHAPES = [(1, 1, 1), (5, 15, 17), (8, 576, 192), (17, 257, 33), (33, 64, 100), (256, 24, 8)]
"""Rank, inputs, outputs."""

LARGEST_ERROR = {torch.int8: 0.011, FP8: 0.043, torch.uint8: 0.11}


def random_adapter(rank: int, in_features: int, out_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank * in_features + out_features)
    return torch.randn(rank, in_features, generator=generator), torch.randn(out_features, rank, generator=generator)


def stored_and_back(a: torch.Tensor, b: torch.Tensor, arena: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    after = torch.full((9,), 255, dtype=torch.uint8)
    stored_a, stored_b = torch.cat((quantize_a(a, arena), after)), torch.cat((quantize_b(b, arena), after))
    return dequantize_a(stored_a, *a.shape, arena), dequantize_b(stored_b, *b.shape, arena)


def update_error(a: torch.Tensor, b: torch.Tensor, arena: torch.dtype) -> float:
    """The error of the update, relative to it."""
    stored_a, stored_b = stored_and_back(a, b, arena)
    return float(torch.linalg.norm(stored_b @ stored_a - b @ a) / torch.linalg.norm(b @ a))


@pytest.mark.parametrize("arena", CODE_BITS)
@pytest.mark.parametrize(("rank", "in_features", "out_features"), SHAPES)
def test_sizes_are_those_of_the_pieces(arena: torch.dtype, rank: int, in_features: int, out_features: int) -> None:
    a, b = random_adapter(rank, in_features, out_features)
    sizes = [quantize_a(a, arena).numel(), quantize_b(b, arena).numel()]
    bits = CODE_BITS[arena]
    assert sizes == [a_bytes(rank, in_features, bits), b_bytes(out_features, rank, bits)]
    module = WireModule(1, "attn_q", 0, in_features, out_features, (SitePart(0, 0),))
    assert sizes == [piece.num_bytes for piece in stored_pieces(module, rank, False, STORED[arena])]


@pytest.mark.parametrize("arena", CODE_BITS)
@pytest.mark.parametrize(("rank", "in_features", "out_features"), [*SHAPES, (16, 576, 1536), (64, 2048, 512)])
def test_the_error_of_the_update_has_a_bound(
    arena: torch.dtype, rank: int, in_features: int, out_features: int
) -> None:
    a, b = random_adapter(rank, in_features, out_features)
    assert update_error(a, b, arena) <= LARGEST_ERROR[arena]


def test_fp8_is_nearer_than_int8_only_where_magnitudes_within_a_row_spread() -> None:
    a, b = random_adapter(16, 576, 192)
    assert update_error(a, b, torch.int8) < update_error(a, b, FP8) / 3
    widths, x = b.new_tensor(range(576)).remainder(7).exp2(), random_adapter(64, 576, 1)[0]
    # Inputs of small activations have large weights: all inputs count alike.
    errors = {}
    for arena in (torch.int8, FP8):
        stored = dequantize_a(quantize_a(a * widths, arena), 16, 576, arena)
        errors[arena] = torch.linalg.norm((x / widths) @ stored.T - x @ a.T) / torch.linalg.norm(x @ a.T)
    assert errors[FP8] < LARGEST_ERROR[FP8]
    assert errors[torch.int8] > 3 * errors[FP8]


@pytest.mark.parametrize("arena", CODE_BITS)
def test_no_value_is_further_off_than_half_a_step_or_than_where_codes_end(arena: torch.dtype) -> None:
    a, _ = random_adapter(16, 300, 1)
    error, largest = (dequantize_a(quantize_a(a, arena), 16, 300, arena) - a).abs(), a.abs().amax(dim=1, keepdim=True)
    most = {torch.int8: 0.51 * largest / 127, torch.uint8: 1.5 * largest / 8}
    # Half a step of a number with three bits after the first one, or of those below the normal ones.
    most[FP8] = torch.maximum(a.abs() / 16, largest / 448 / 1024) * (1 + 1e-6)
    assert bool((error <= most[arena]).all())


@pytest.mark.parametrize("scale", [1.0, 1e-43, 1e-41, 3e38])
def test_codes_of_fp8_are_numbers(scale: float) -> None:
    a, b = (values.clamp(-1, 1) * scale for values in random_adapter(40, 100, 48))
    codes_a = quantize_a(a, FP8)[a_header_bytes(40) :]
    codes_b = quantize_b(b, FP8).view(3, -1)[:, SCALE_BYTES:]
    for codes in (codes_a, codes_b):
        assert bool(torch.isfinite(codes.contiguous().view(FP8).float()).all())


def test_every_number_of_fp8_comes_back_from_bytes_of_its_own() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    row = numbers[torch.isfinite(numbers)]
    a = torch.stack((row, row * 2.0**-60, -row * 2.0**90))
    assert dequantize_a(quantize_a(a, FP8), 3, 254, FP8).equal(a)
    b = row.repeat(2, 1)
    assert dequantize_b(quantize_b(b, FP8), 2, 254, FP8).equal(b)


@pytest.mark.parametrize("arena", CODE_BITS)
@pytest.mark.parametrize("scale", [0.0, 1e-35, 1e30])
def test_values_of_every_size_are_stored(arena: torch.dtype, scale: float) -> None:
    a, b = random_adapter(8, 40, 24)
    stored_a, stored_b = stored_and_back(a * scale, b * scale, arena)
    for stored, sent in ((stored_a, a * scale), (stored_b, b * scale)):
        assert bool(torch.isfinite(stored).all())
        assert torch.linalg.norm(stored.double() - sent.double()) <= 0.1 * torch.linalg.norm(sent.double())


@pytest.mark.parametrize("arena", CODE_BITS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_floats_stay_finite(arena: torch.dtype, sign: int) -> None:
    largest = torch.full((16, 16), sign * torch.finfo(torch.float32).max)
    for stored in stored_and_back(largest, largest, arena):
        assert bool((stored * sign >= 3.3e38).all())
        assert bool(torch.isfinite(stored).all())


@pytest.mark.parametrize("arena", CODE_BITS)
def test_a_row_of_a_and_sixteen_outputs_of_b_depend_on_nothing_else(arena: torch.dtype) -> None:
    a, b = random_adapter(8, 100, 48)
    stored_a, stored_b = stored_and_back(a, b, arena)
    assert dequantize_a(quantize_a(a[3:4], arena), 1, 100, arena).equal(stored_a[3:4])
    assert dequantize_b(quantize_b(b[16:32], arena), 16, 8, arena).equal(stored_b[16:32])
    assert dequantize_b(quantize_b(b[21:22], arena), 1, 8, arena).equal(stored_b[21:22])


def tied_errors(rank: int, in_features: int) -> torch.Tensor:
    """Values of few steps, so that several scales often are as good as each other, and many lie between two codes."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-16, 17, (rank, in_features), generator=generator) / 16.0


@pytest.mark.parametrize("arena", CODE_BITS)
@pytest.mark.parametrize(("rank", "in_features", "out_features"), [*SHAPES, (64, 1536, 600)])
def test_compiled_codes_are_those_of_torch(arena: torch.dtype, rank: int, in_features: int, out_features: int) -> None:
    adapters = [random_adapter(rank, in_features, out_features)]
    adapters += [tuple(values * scale for values in adapters[0]) for scale in (1e-38, 1e-41, 1e30, 1e38, -0.0)]
    adapters.append((tied_errors(rank, in_features), tied_errors(out_features, rank)))
    for a, b in adapters:
        a, b = a.nan_to_num(), b.nan_to_num()
        assert quantize_a(a, arena).equal(reference_a(a, arena))
        assert quantize_b(b, arena).equal(reference_b(b, arena))
