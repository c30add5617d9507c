"""What lies between matrix products, against float64."""

from __future__ import annotations

import pytest
import torch
from support.lora_cases import TOLERANCES

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
@pytest.mark.parametrize("size", [1500, 33])
def test_elementwise_silu_mul(implementation, size, dtype):
    gate_up = 2 * _random(5, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    _assert_close(implementation.silu_mul(gate_up.to(implementation.device)), gate / (1 + (-gate).exp()) * up, dtype)
