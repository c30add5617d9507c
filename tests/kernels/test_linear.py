"""packed_linear and packed_embedding against float64, on shapes that kernels get wrong."""

from __future__ import annotations

import pytest
import torch

from multilora_kernels import (
    HugePages,
    PackedWeight,
    activation_dtype,
    linear,
    load_cpu_kernels,
    packed_embedding,
    packed_linear,
)
from multilora_kernels.cpu import rounds_activations

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The weights are exact in float64 and every product is one float32 operation: storage does not widen the bounds.
RTOL, ATOL = 2e-5, 2e-5
ROWS = (1, 2, 3, 7, 8, 9, 10, 63, 64, 65, 133)
SHAPES = [(1, 1), (7, 3), (47, 16), (48, 129), (49, 128), (145, 77), (311, 260), (1, 32), (96, 64), (200, 2016)]
"""(out_features, in_features): around a panel's 48, 24 or 24 outputs and a block's 256 inputs; tiles of 32 inputs."""
BFLOAT16_SHAPES = [
    (1, 2),
    (7, 3),
    (7, 6),
    (47, 16),
    (48, 130),
    (49, 128),
    (145, 78),
    (311, 1036),
    (1, 32),
    (96, 64),
    (200, 2016),
]
"""Most with an even number of inputs, whose pairs are multiplied."""


def random_weight(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out_features)
    return (torch.randn(out_features, in_features, generator=generator) * in_features**-0.5).to(dtype)


def packed(weight: torch.Tensor, compute_dtype: torch.dtype = torch.float32) -> PackedWeight:
    result = PackedWeight.empty(*weight.shape, weight.dtype, CPU, compute_dtype, HugePages())
    result.copy_rows(0, weight)
    return result


def as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """x, rounded where this processor rounds it for products in bfloat16."""
    assert load_cpu_kernels()
    return x.bfloat16().float() if rounds_activations(torch.bfloat16, x.shape[1]) else x


def random_rows(rows: int, in_features: int) -> torch.Tensor:
    return torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_float64_for_every_shape_dtype_and_number_of_rows(shape, dtype):
    weight = random_weight(*shape, dtype)
    for rows in ROWS:
        x = random_rows(rows, shape[1])
        y = packed_linear(x, packed(weight))
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("in_features", [700, 704])
@pytest.mark.parametrize(
    ("dtype", "compute_dtype"),
    [
        *((dtype, torch.float32) for dtype in DTYPES),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_row_is_the_same_bits_whoever_else_is_there_and_however_many_threads(dtype, compute_dtype, in_features):
    weight, x = packed(random_weight(311, in_features, dtype), compute_dtype), random_rows(300, in_features)
    expected = packed_linear(x, weight)
    threads = torch.get_num_threads()
    for n in (1, 2, 3, 7):
        torch.set_num_threads(n)
        for rows in ROWS:
            assert torch.equal(packed_linear(x[-rows:], weight), expected[-rows:])
    torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", BFLOAT16_SHAPES)
def test_in_bfloat16_it_is_near_float64_for_every_shape(shape):
    weight = random_weight(*shape, torch.bfloat16)
    ours = packed(weight, torch.bfloat16)
    assert ours.is_packed
    for rows in ROWS:
        x = random_rows(rows, shape[1])
        exact = as_multiplied(x).double()
        bound = shape[1] * 2**-24 * (exact.abs() @ weight.double().abs().T)
        assert ((packed_linear(x, ours).double() - exact @ weight.double().T).abs() <= bound).all()


@pytest.mark.parametrize("in_features", [78, 96])
def test_in_bfloat16_x_is_read_as_it_lies_and_rows_and_embeddings_come_back(in_features):
    weight, x = random_weight(150, in_features, torch.bfloat16), random_rows(40, 300)
    ours = packed(weight, torch.bfloat16)
    for view in (x[:, 5 : 5 + in_features], x[:, : 2 * in_features : 2], x[::2, :in_features], x[:0, :in_features]):
        assert packed_linear(view, ours).equal(packed_linear(as_multiplied(view.contiguous()), ours))
    assert ours.shape == weight.shape
    assert ours.rows(23, 101).equal(weight[23:124])
    ids = torch.tensor([0, 149, 47, 48, 95, 96, 149])
    assert packed_embedding(ids, ours, torch.float32).equal(weight[ids].float())


def test_in_bfloat16_what_is_no_number_stays_none_and_reaches_no_other_row():
    ours, x = packed(random_weight(50, 34, torch.bfloat16), torch.bfloat16), random_rows(9, 34)
    expected = packed_linear(x, ours)
    x[3, 7], x[5, 8] = torch.nan, torch.inf
    y = packed_linear(x, ours)
    assert y[3].isnan().all()
    assert not y[5].isfinite().any()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert y[others].equal(expected[others])


def test_an_x_with_gaps_is_read_as_it_lies():
    weight, x = random_weight(50, 33, torch.float32), random_rows(9, 200)
    for view in (x[:, 5:38], x[:, :66:2], x[::2, :33], x.T[:33, :9].T, x[:0, :33]):
        torch.testing.assert_close(packed_linear(view, packed(weight)), view @ weight.T, rtol=RTOL, atol=ATOL)


def test_the_bias_is_added_to_every_row():
    weight, bias, x = random_weight(50, 33, torch.float32), torch.randn(50), random_rows(3, 33)
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(packed_linear(x, packed(weight), bias), expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("in_features", [5, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_as_they_were_stored_wherever_the_parts_of_a_fused_weight_end(dtype, in_features):
    weight = random_weight(200, in_features, dtype)
    fused = PackedWeight.empty(200, in_features, dtype, CPU, torch.float32, HugePages())
    for first, end in ((170, 200), (0, 23), (23, 24), (24, 97), (97, 170)):
        fused.copy_rows(first, weight[first:end])
    assert fused.shape == weight.shape
    assert fused.rows(0, 200).equal(weight)
    assert fused.rows(23, 101).equal(weight[23:124])


@pytest.mark.parametrize("in_features", [37, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_the_rows_of_the_weight(dtype, in_features):
    weight = random_weight(150, in_features, dtype)
    ids = torch.tensor([0, 149, 47, 48, 95, 96, 149])
    assert packed_embedding(ids, packed(weight), torch.float32).equal(weight[ids].float())
    assert packed_embedding(ids[:0], packed(weight), torch.float32).shape == (0, in_features)


@pytest.mark.parametrize("token", [-1, 150])
def test_a_token_outside_the_vocabulary_is_refused_and_not_read(token):
    with pytest.raises(IndexError, match=f"token {token} is not one of 150"):
        packed_embedding(torch.tensor([3, token]), packed(random_weight(150, 5, torch.float32)), torch.float32)


@pytest.mark.parametrize("compute_dtype", DTYPES)
def test_without_a_compiler_torch_multiplies_plain_weights(monkeypatch, compute_dtype):
    monkeypatch.setattr(linear, "panel_shape", lambda: None)
    assert activation_dtype(compute_dtype, CPU) == compute_dtype
    assert_torch_multiplies(compute_dtype)


def test_in_float16_torch_multiplies_plain_weights():
    assert_torch_multiplies(torch.float16)


def assert_torch_multiplies(compute_dtype: torch.dtype) -> None:
    weight, x = random_weight(50, 33, torch.bfloat16), random_rows(4, 33).to(compute_dtype)
    plain = packed(weight, compute_dtype)
    assert not plain.is_packed
    assert packed_linear(x, plain).equal(x @ weight.to(compute_dtype).T)
    assert packed_embedding(torch.tensor([7]), plain, compute_dtype).equal(weight[7:8].to(compute_dtype))
    assert plain.rows(3, 20).equal(weight[3:23])


def test_weights_for_bfloat16_take_float32():
    assert activation_dtype(torch.bfloat16, CPU) == torch.float32
    assert packed(random_weight(50, 33, torch.bfloat16), torch.bfloat16).is_packed


def test_what_does_not_fit_the_panels_is_refused():
    weight = packed(random_weight(50, 33, torch.float32))
    for x in (random_rows(2, 32), random_rows(2, 33).double(), torch.randn(33)):
        with pytest.raises(RuntimeError, match="x must be float32"):
            packed_linear(x, weight)
    with pytest.raises(RuntimeError, match="do not hold 7"):
        packed_linear(random_rows(2, 33), PackedWeight(weight.data, 7))
