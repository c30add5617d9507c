"""quantized_linear, quantized_lora_linear and quantized_embedding, on shapes that kernels get wrong.

Against float64 of the codes' meaning, times activations as they are multiplied; and bit for bit against float32
weights of the same values where these may come beside the codes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from support.lora_cases import MIXED_RANKS, ODD, make_case

from benchmarks.lora_workloads import LinearShape
from multilora_kernels import (
    CodeType,
    HugePages,
    PackedWeight,
    QuantizedWeight,
    lora_apply,
    packed_linear,
    quantized,
    quantized_embedding,
    quantized_linear,
    quantized_lora_linear,
)
from multilora_kernels.cpu import capability, compiled_kernels

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The weights are exact in float64, but for one rounding to float32, and every product is one float32 operation.
RTOL, ATOL = 2e-5, 2e-5
ROWS = (1, 2, 8, 9, 16, 17, 130)
SHAPES = [
    (1, 8, 8),
    (17, 30, 8),
    (33, 30, 30),
    (49, 30, 7),
    (49, 96, 32),
    (145, 96, 40),
    (33, 576, 128),
    (17, 1536, 1536),
]
"""(out_features, in_features, group_size): one group, many, and ones that end inside of a word of codes or of a row."""
GROUP_SHAPES = [
    (1, 3, 3),
    (17, 30, 8),
    (47, 44, 44),
    (97, 300, 16),
    (145, 96, 40),
    (33, 1044, 128),
    (17, 776, 776),
    (50, 320, 256),
    (49, 96, 32),
    (73, 1184, 96),
    (25, 553, 553),
]
"""Groups of whole words, or of 32 inputs and more, some of which go on in the next block, and all inputs in one."""
KINDS = [
    (CodeType.INT4, False),
    (CodeType.INT4, True),
    (CodeType.INT8, False),
    (CodeType.INT8, True),
    (CodeType.FP8, False),
]
"""Codes, and whether their zeros differ."""


@dataclass(frozen=True)
class Codes:
    """What a checkpoint has of one linear."""

    code_type: CodeType
    group_size: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    @classmethod
    def random(cls, shape, kind=(CodeType.INT4, True), scale_dtype=torch.bfloat16) -> Codes:
        """Weights of about in_features ** -0.5."""
        (out_features, in_features, group_size), (code_type, has_zeros) = shape, kind
        generator = torch.Generator().manual_seed(in_features)
        codes = torch.randint(1 << code_type.bits, (out_features, in_features), generator=generator).to(torch.uint8)
        spread = 64 if code_type is CodeType.FP8 else (1 << code_type.bits) / 4
        num_groups = -(-in_features // group_size)
        scales = torch.rand(out_features, num_groups, generator=generator).add(0.5) * in_features**-0.5 / spread
        zeros = None
        if code_type is CodeType.FP8:
            codes[codes & 0x7F == 0x7F] = 1
        elif has_zeros:
            zeros = torch.randint(1 << code_type.bits, scales.shape, generator=generator).to(torch.uint8)
        else:
            zeros = torch.full(scales.shape, 1 << (code_type.bits - 1), dtype=torch.uint8)
        return cls(code_type, group_size, codes, scales.to(scale_dtype), zeros)

    def weight(self, **options) -> QuantizedWeight:
        shape = self.codes.shape
        weight = QuantizedWeight(*shape, self.code_type, self.group_size, self.scales.dtype, CPU, **options)
        weight.copy_rows(0, self.codes, self.scales, self.zeros)
        return weight

    def meaning(self) -> torch.Tensor:
        """W in float64."""
        is_float = self.zeros is None
        values = self.codes.view(torch.float8_e4m3fn).double() if is_float else self.codes.double()
        zeros = torch.zeros_like(self.scales) if is_float else self.zeros
        repeated = [
            x.double().repeat_interleave(self.group_size, 1)[:, : values.shape[1]] for x in (zeros, self.scales)
        ]
        return (values - repeated[0]) * repeated[1]

    def magnitude(self) -> torch.Tensor:
        """The sizes of what a product is the sum of, in float64: codes and zeros as they are stored, times scales."""
        if self.zeros is None:
            return self.meaning().abs()
        middle = 1 << (self.code_type.bits - 1)
        zeros, scales = (
            x.double().repeat_interleave(self.group_size, 1)[:, : self.codes.shape[1]]
            for x in (self.zeros.double() - middle, self.scales)
        )
        return ((self.codes.double() - middle).abs() + zeros.abs()) * scales


def random_rows(rows: int, in_features: int) -> torch.Tensor:
    """Between them lies what no kernel may read."""
    x = torch.full((rows, in_features + 9), torch.nan)
    x[:, :in_features] = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows))
    return x[:, :in_features]


def as_multiplied(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x as this processor multiplies it with the weight, in float64: as it is, in bfloat16, or as integers."""
    if weight.panels.digits:
        return as_integers(x, weight.panels.digits, span_of(weight))
    return x.bfloat16().double() if weight.panels.codes.dim() == 5 else x.double()


def span_of(weight: QuantizedWeight) -> int:
    """The neighbouring inputs whose integers share a power of two."""
    if capability() == "avx2":
        return 32
    is_one_group = weight.num_groups == 1
    return next(span for span in (128, 64, 32) if is_one_group or weight.group_size % span == 0)


def as_integers(x: torch.Tensor, digits: int, span: int) -> torch.Tensor:
    """Each input as the nearest multiple of a power of two, which the largest of its span decides, in float64."""
    _, exponents = torch.frexp(largest_of_spans(x.double(), span) * 1.004)
    units = torch.pow(2.0, (exponents - bits_of(digits)).double())
    return torch.round(x.double() / units) * units


def largest_of_spans(x: torch.Tensor, span: int) -> torch.Tensor:
    """For each input the largest magnitude of its span, [rows, in_features]."""
    spans = torch.nn.functional.pad(x, (0, -x.shape[1] % span)).unflatten(1, (-1, span))
    return spans.abs().amax(2).repeat_interleave(span, 1)[:, : x.shape[1]]


def bits_of(digits: int) -> int:
    """Of an integer without its sign."""
    return {3: 23, 2: 15, 1: 15}[digits]


def packed_floats(meaning: torch.Tensor) -> PackedWeight:
    weight = PackedWeight.empty(*meaning.shape, torch.float32, CPU, torch.float32, HugePages())
    weight.copy_rows(0, meaning.float())
    return weight


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_float64_and_where_activations_stay_floats_has_the_bits_of_float32_weights(shape, kind, scale_dtype):
    codes = Codes.random(shape, kind, scale_dtype)
    weight, meaning = codes.weight(), codes.meaning()
    floats = packed_floats(meaning)
    for rows in ROWS:
        x = random_rows(rows, shape[1])
        y = quantized_linear(x, weight)
        torch.testing.assert_close(y.double(), x.double() @ meaning.T, rtol=RTOL, atol=ATOL)
        assert weight.panels.digits or y.equal(packed_linear(x, floats))


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", GROUP_SHAPES)
@pytest.mark.parametrize("may_round", [False, True])
def test_it_is_near_float64_in_all_shapes(shape, kind, scale_dtype, may_round):
    codes = Codes.random(shape, kind, scale_dtype)
    weight, meaning, magnitude = codes.weight(may_round=may_round), codes.meaning(), codes.magnitude()
    assert weight.rows(0, shape[0]).equal(meaning.float())
    for rows in (1, 3, 8, 9, 17, 33, 129):
        x = random_rows(rows, shape[1])
        exact = as_multiplied(x, weight)
        bound = (shape[1] + weight.num_groups + 2) * 2**-24 * (exact.abs() @ magnitude.T)
        assert ((quantized_linear(x, weight).double() - exact @ meaning.T).abs() <= bound).all()


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("code_type", [CodeType.INT4, CodeType.INT8])
@pytest.mark.parametrize("shape", [(49, 96, 32), (73, 320, 16), (73, 1184, 96), (25, 60, 20)])
@pytest.mark.parametrize("may_round", [False, True])
def test_zeros_may_be_any_numbers(shape, code_type, scale_dtype, may_round):
    codes = Codes.random(shape, (code_type, True), scale_dtype)
    zeros = codes.zeros + torch.rand(codes.zeros.shape, generator=torch.Generator().manual_seed(7)).double()
    codes = replace(codes, zeros=zeros)
    weight, magnitude = codes.weight(may_round=may_round, zero_dtype=torch.float32), codes.magnitude()
    rows = weight.rows(0, shape[0])
    torch.testing.assert_close(rows.double(), codes.meaning(), rtol=0, atol=float(magnitude.max()) * 2**-22)
    for count in (1, 9, 33):
        x = random_rows(count, shape[1])
        exact = as_multiplied(x, weight)
        bound = (shape[1] + weight.num_groups + 4) * 2**-24 * (exact.abs() @ magnitude.T)
        y = quantized_linear(x, weight)
        assert ((y.double() - exact @ rows.double().T).abs() <= bound).all()
        assert y[-1:].equal(quantized_linear(x[-1:], weight))
    ids = torch.tensor([0, shape[0] - 1, 7])
    assert quantized_embedding(ids, weight, torch.float32).equal(rows[ids])


def test_groups_that_end_inside_of_a_step_are_multiplied_as_floats():
    for shape, kind in itertools.product([(49, 30, 7), (145, 96, 20)], KINDS):
        codes, x = Codes.random(shape, kind), random_rows(9, shape[1])
        floats = packed_linear(x, packed_floats(codes.meaning()))
        for may_round in (False, True):
            assert quantized_linear(x, codes.weight(may_round=may_round)).equal(floats)


@pytest.mark.parametrize(
    ("code_type", "may_round", "digits"),
    [(CodeType.INT4, False, 3), (CodeType.INT4, True, 2), (CodeType.INT8, True, 1)],
)
def test_integers_are_as_near_to_activations_as_they_promise_however_different_these_are(code_type, may_round, digits):
    """Weights of one, so that a product tells an activation."""
    zero = 1 << (code_type.bits - 1)
    zeros = torch.full((96, 1), zero, dtype=torch.uint8)
    weight = Codes(code_type, 96, torch.eye(96, dtype=torch.uint8) + zero, torch.ones(96, 1), zeros).weight(
        may_round=may_round
    )
    if capability() == "avx2":
        assert weight.panels.digits == digits
    x = torch.randn(300, 96, generator=torch.Generator().manual_seed(0))
    x *= torch.pow(2.0, (torch.arange(300) - 150).clamp(-90, 90))[:, None]
    x[:, 5:9] *= 2**-9
    x[::7, 32:64] = 0
    x[3] = 0.999
    y = quantized_linear(x, weight).double()
    assert y.equal(as_multiplied(x, weight))
    if weight.panels.digits:
        largest = largest_of_spans(x.double(), span_of(weight))
        assert ((y - x.double()).abs() <= 1.004 * largest * 2.0 ** -bits_of(digits)).all()


@pytest.mark.parametrize("may_round", [False, True])
@pytest.mark.parametrize("group_size", [8, 44])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_none_and_reaches_no_other_row(kind, group_size, may_round):
    weight = Codes.random((50, 44, group_size), kind).weight(may_round=may_round)
    x = random_rows(10, 44).clone()
    expected = quantized_linear(x, weight)
    x[3, 7], x[5, 8], x[9, 43] = torch.nan, torch.inf, torch.nan
    y = quantized_linear(x, weight)
    assert y[[3, 9]].isnan().all()
    assert not y[5].isfinite().any()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert y[others].equal(expected[others])


@pytest.mark.parametrize("shape", [(311, 700, 32), (97, 1000, 128), (50, 448, 64), (50, 553, 553)])
@pytest.mark.parametrize("may_round", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bits_whoever_else_is_there_and_however_many_threads(kind, may_round, shape):
    weight, x = Codes.random(shape, kind).weight(may_round=may_round), random_rows(300, shape[1])
    expected = quantized_linear(x, weight)
    for threads, rows in itertools.product((1, 2, 3), (*ROWS, 300)):
        with torch_threads(threads):
            assert quantized_linear(x[-rows:], weight).equal(expected[-rows:])


@pytest.mark.parametrize("may_round", [False, True])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_back_wherever_the_parts_of_a_fused_weight_end(kind, scale_dtype, may_round):
    codes = Codes.random((200, 37, 8), kind, scale_dtype)
    fused = QuantizedWeight(200, 37, codes.code_type, 8, scale_dtype, CPU, may_round=may_round)
    for first, end in ((170, 200), (0, 23), (23, 24), (24, 97), (97, 170)):
        rows = slice(first, end)
        fused.copy_rows(
            first, codes.codes[rows], codes.scales[rows], None if codes.zeros is None else codes.zeros[rows]
        )
    assert fused.shape == (200, 37)
    assert fused.rows(0, 200).equal(codes.meaning().float())
    assert fused.rows(23, 101).equal(codes.meaning()[23:124].float())
    assert fused.rows(23, 9).equal(codes.meaning()[23:32].float())


def test_every_code_of_float8_that_is_a_number_means_what_torch_says_and_no_other_is_taken():
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    codes = Codes(CodeType.FP8, 254, torch.tensor([numbers], dtype=torch.uint8), torch.ones(1, 1), None)
    y = quantized_linear(torch.eye(254), codes.weight())
    assert y.flatten().equal(codes.codes.flatten().view(torch.float8_e4m3fn).float())
    codes.codes[0, 7] = 0xFF
    with pytest.raises(ValueError, match="is not a number"):
        codes.weight()


@pytest.mark.parametrize("may_round", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_has_the_bytes_of_its_codes_scales_and_zeros_unless_all_zeros_are_alike(kind, may_round):
    code_type, has_zeros = kind
    bits = code_type.bits + 16 / 32 + (8 / 32 if has_zeros else 0)
    assert Codes.random((96, 64, 32), kind).weight(may_round=may_round).nbytes == 96 * 64 * bits / 8


@pytest.mark.parametrize("may_round", [False, True])
def test_an_x_with_gaps_is_read_as_it_lies(may_round):
    codes, x = Codes.random((50, 33, 33)), random_rows(40, 200)
    weight, meaning = codes.weight(may_round=may_round), codes.meaning().float()
    for view in (x[:9, 5:38], x[:9, :66:2], x[:18:2, :33], x.T[:33, :9].T, x[:0, :33]):
        exact = as_multiplied(view, weight).float() @ meaning.T
        torch.testing.assert_close(quantized_linear(view, weight), exact, rtol=RTOL, atol=ATOL)


def test_the_bias_is_added_to_every_row():
    weight, bias, x = Codes.random((50, 33, 8)).weight(), torch.randn(50), random_rows(3, 33)
    assert quantized_linear(x, weight, bias).equal(quantized_linear(x, weight) + bias)


@pytest.mark.parametrize("may_round", [False, True])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_the_rows_of_the_weight(kind, scale_dtype, may_round):
    codes = Codes.random((150, 37, 8), kind, scale_dtype)
    ids, weight = torch.tensor([0, 149, 47, 48, 95, 96, 149]), codes.weight(may_round=may_round)
    assert quantized_embedding(ids, weight, torch.float32).equal(codes.meaning()[ids].float())
    assert quantized_embedding(ids[:0], weight, torch.float32).shape == (0, 37)


@pytest.mark.parametrize("token", [-1, 150])
def test_a_token_outside_the_vocabulary_is_refused_and_not_read(token):
    with pytest.raises(IndexError, match=f"token {token} is not one of 150"):
        quantized_embedding(torch.tensor([3, token]), Codes.random((150, 8, 8)).weight(), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_without_a_compiler_or_in_half_precision_torch_multiplies_the_weights(monkeypatch, kind, compute_dtype):
    monkeypatch.setattr(quantized, "panel_shape", lambda: None)
    codes, x = Codes.random((50, 33, 8), kind), random_rows(4, 33).to(compute_dtype)
    weight, meaning = codes.weight(compute_dtype=compute_dtype), codes.meaning().float().to(compute_dtype)
    assert not weight.is_packed
    assert quantized_linear(x, weight).equal(torch.nn.functional.linear(x, meaning))
    assert quantized_embedding(torch.tensor([7, 3]), weight, compute_dtype).equal(meaning[[7, 3]])
    assert weight.rows(3, 20).equal(codes.meaning()[3:23].float())


def test_weights_are_packed_for_float32_only():
    assert Codes.random((50, 33, 8)).weight().is_packed
    assert not Codes.random((50, 33, 8)).weight(compute_dtype=torch.bfloat16).is_packed


def fused_and_separate(kind, shape: LinearShape, num_tokens: int, threads: int, may_round: bool, **options):
    """quantized_lora_linear, and the base linear and the update one after the other."""
    case = make_case("uniform", num_tokens, shape, MIXED_RANKS, **options)
    case.x[:] = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(1))
    weight = Codes.random((shape.out_features, shape.in_features, 32), kind).weight(may_round=may_round)
    separate = quantized_linear(case.x, weight)
    lora_apply(case.x, separate, case.tables, 0, shape.slice_sizes, case.segments)
    with torch_threads(threads):
        fused = quantized_lora_linear(case.x, weight, case.tables, 0, shape.slice_sizes, case.segments)
    return fused, separate


@pytest.mark.parametrize("may_round", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_with_adapters_it_has_the_bits_of_the_base_linear_and_the_update_whoever_else_is_there(kind, may_round):
    shape = LinearShape(in_features=544, slice_sizes=(600, 1, 71))
    for num_tokens, threads in itertools.product((1, 16, 70), (1, 2, 4)):
        fused, separate = fused_and_separate(kind, shape, num_tokens, threads, may_round, magnitudes=True)
        assert fused.equal(separate)


def test_with_adapters_the_bias_comes_last_and_plain_weights_are_multiplied_by_torch(monkeypatch):
    case, bias = make_case("uniform", 9, ODD), torch.randn(ODD.out_features)
    case.x[:] = torch.randn(case.x.shape)
    codes = Codes.random((ODD.out_features, ODD.in_features, 8))
    arguments = (case.tables, 0, ODD.slice_sizes, case.segments)
    packed = quantized_lora_linear(case.x, codes.weight(), *arguments)
    assert quantized_lora_linear(case.x, codes.weight(), *arguments, bias).equal(packed + bias)
    monkeypatch.setattr(quantized, "panel_shape", lambda: None)
    plain = quantized_lora_linear(case.x, codes.weight(), *arguments, bias)
    torch.testing.assert_close(plain, packed + bias, rtol=RTOL, atol=ATOL)


def test_what_does_not_fit_the_panels_is_refused():
    panels, x = Codes.random((50, 33, 8)).weight().panels, random_rows(2, 33)
    multiply = compiled_kernels().packed_linear
    with pytest.raises(RuntimeError, match="x must be float32"):
        multiply(random_rows(2, 32), panels, 50, None)
    with pytest.raises(RuntimeError, match="do not hold 7"):
        multiply(x, panels, 7, None)
    for changed, message in (
        ({"codes": panels.codes.short()}, "codes are int32 words"),
        ({"codes": panels.codes.unsqueeze(-1).repeat(1, 1, 1, 1, 2)}, "codes must be contiguous"),
        ({"in_features": 41}, "41 inputs are 6 codes of an output, not 5"),
        ({"group_size": 34}, "a group of 34 of 33 inputs"),
        ({"group_size": 16}, "scales must be contiguous"),
        ({"scales": panels.scales.double()}, "scales are float32"),
        ({"zeros": panels.zeros[:, :, 1:]}, "zeros must be contiguous"),
        ({"zeros": panels.zeros.short()}, "zeros are int8"),
        ({"digits": 4}, "this processor multiplies no int32 in groups of 8 with activations of 4 digits"),
    ):
        with pytest.raises(RuntimeError, match=message):
            multiply(x, panels._replace(**changed), 50, None)
