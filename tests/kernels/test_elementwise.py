"""The operations between matrix products, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.lora_cases import TOLERANCES

from multilora_kernels import add_layer_norm, add_rms_norm, gelu, gelu_tanh, gelu_tanh_mul, silu_mul

EPS = 1e-5


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [576, 40, 1])
def test_elementwise_add_rms_norm(implementation, size, dtype):
    x, update = _random(7, size, dtype=dtype), 3 * _random(7, size, dtype=dtype).flip(0)
    weight = _random(size, dtype=dtype)
    on_device = (tensor.to(implementation.device) for tensor in (x, update, weight))
    normed, total = implementation.add_rms_norm(*on_device, EPS)
    _assert_close(total, x.double() + update.double(), dtype)
    exact = total.cpu().double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    _assert_close(normed, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [576, 41])
def test_elementwise_add_layer_norm(implementation, size, has_bias, dtype):
    x, update = _random(7, size, dtype=dtype) + 5, 3 * _random(7, size, dtype=dtype).flip(0)
    weight, bias = _random(size, dtype=dtype), _random(size, dtype=dtype).flip(0) if has_bias else None
    on_device = (None if tensor is None else tensor.to(implementation.device) for tensor in (x, update, weight, bias))
    normed, total = implementation.add_layer_norm(*on_device, EPS)
    _assert_close(total, x.double() + update.double(), dtype)
    exact, offset = total.cpu().double(), 0.0 if bias is None else bias.double()
    centred = exact - exact.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double() + offset
    _assert_close(normed, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [1500, 33])
def test_elementwise_gelu_tanh_alone_and_times_ups(implementation, size, dtype):
    gate_up = 2 * _random(5, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate / 2 * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
    _assert_close(implementation.gelu_tanh_mul(gate_up.to(implementation.device)), expected * up, dtype)
    alone = implementation.gelu_tanh(gate_up[:, :size].contiguous().to(implementation.device))
    _assert_close(alone, expected, dtype)


def test_elementwise_gelu_tanh_of_small_and_large_numbers(implementation):
    x = torch.tensor([[-1e30, -200.0, -11.0, -9.0, -1.0, -1e-30, 0.0, 1e-30, 1e-5, 9.0, 200.0, 1e30, torch.nan]])
    expected = F.gelu(x.double(), approximate="tanh").float()
    actual = implementation.gelu_tanh(x.to(implementation.device)).cpu()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [1500, 33])
def test_elementwise_gelu(implementation, size, dtype):
    x = 2 * _random(5, size, dtype=dtype)
    _assert_close(implementation.gelu(x.to(implementation.device)), F.gelu(x.double()), dtype)


def test_elementwise_gelu_of_small_and_large_numbers(implementation):
    x = torch.cat((torch.linspace(-15, 15, 3001), torch.tensor([-1e30, -200.0, -1e-30, 1e-30, 200.0, 1e30, torch.nan])))
    actual = implementation.gelu(x[None].to(implementation.device)).cpu()
    torch.testing.assert_close(actual, F.gelu(x[None].double()).float(), rtol=3e-7, atol=3e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [1500, 33])
def test_elementwise_silu_mul(implementation, size, dtype):
    gate_up = 2 * _random(5, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    _assert_close(implementation.silu_mul(gate_up.to(implementation.device)), gate / (1 + (-gate).exp()) * up, dtype)


def test_elementwise_silu_mul_of_gates_beyond_what_exp_can_represent(implementation):
    gates = torch.tensor([[-1e30, -200.0, -88.5, -87.5, -1e-30, 0.0, 1e-30, 87.5, 88.5, 200.0, 1e30, torch.nan]])
    product = implementation.silu_mul(torch.cat((gates, torch.ones_like(gates)), -1).to(implementation.device)).cpu()
    torch.testing.assert_close(product, F.silu(gates.double()).float(), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("size", [576, 33, 1])
def test_a_row_has_the_same_bits_whatever_other_rows_and_threads_there_are(size):
    x, update = _random(3001, size, dtype=torch.float32), _random(3001, size, dtype=torch.float32).flip(0)
    weight, gate_up = _random(size, dtype=torch.float32), torch.cat((x, update), -1)

    def rows(rows: slice) -> list[torch.Tensor]:
        norms = (
            *add_rms_norm(x[rows], update[rows], weight, EPS),
            *add_layer_norm(x[rows], update[rows], weight, weight, EPS),
        )
        return [*norms, silu_mul(gate_up[rows]), gelu_tanh_mul(gate_up[rows]), gelu_tanh(x[rows]), gelu(x[rows])]

    together, alone, threads = rows(slice(None)), rows(slice(2999, 3000)), torch.get_num_threads()
    assert all(torch.equal(a[2999:3000], b) for a, b in zip(together, alone, strict=True))
    for n in (1, 2, 4):
        torch.set_num_threads(n)
        assert all(torch.equal(a, b) for a, b in zip(together, rows(slice(None)), strict=True))
    torch.set_num_threads(threads)


def test_elementwise_rows_may_lie_apart():
    wide = _random(6, 80, dtype=torch.float32)
    x, update, weight = wide[::2, :40], wide[1::2, 40:], wide[0, ::2]
    normed, total = add_rms_norm(x, update, weight, EPS)
    assert torch.equal(total, x + update)
    assert torch.equal(normed, add_rms_norm(x.contiguous(), update.contiguous(), weight.contiguous(), EPS)[0])
    for activation in (silu_mul, gelu_tanh_mul, gelu_tanh, gelu):
        assert torch.equal(activation(wide[:, 20:60]), activation(wide[:, 20:60].contiguous()))


def test_elementwise_add_rms_norm_refuses_what_does_not_belong_together():
    x = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match="do not belong together"):
        add_rms_norm(x, x[:1], x[0], EPS)
    with pytest.raises(RuntimeError, match="do not belong together"):
        add_layer_norm(x, x, x[0], x[0, :7], EPS)
