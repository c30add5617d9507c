"""Norms against their equations in float64."""

from __future__ import annotations

import torch

from multilora_engine.models.norms import LayerNorm, RMSNorm


def test_rms_norm_sums_squares_in_float32() -> None:
    x = torch.full((2, 1000), 300.0, dtype=torch.float16)
    x[1, ::2] = -100.0
    weight = torch.linspace(-1, 2, 1000, dtype=torch.float16)
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt() * weight.double()
    torch.testing.assert_close(RMSNorm(weight, 1e-5).forward(x).double(), exact, atol=2e-3, rtol=2e-3)


def test_layer_norm_adds_the_update_first_and_tells_the_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    x, update, weight, bias = (torch.randn(3, 33, generator=generator) for _ in range(4))
    normed, total = LayerNorm(weight[0], bias[0], 1e-3).add(x, update)
    both = (x + update).double()
    centred = both - both.mean(-1, keepdim=True)
    exact = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight[0] + bias[0]
    torch.testing.assert_close(total, x + update)
    torch.testing.assert_close(normed.double(), exact, atol=1e-5, rtol=1e-5)
