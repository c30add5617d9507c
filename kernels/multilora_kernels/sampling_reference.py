"""`sample_tokens` in plain PyTorch: the oracle of the self-test, and the path without compiled kernels.

See `sampling` for the definition. This implementation sorts whole rows. It never waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch

_UNITS = 2.0**34
_ROUND_TO_UNIT = 1.5 * 2.0**-11
_ROUNDED = 2.0**-11
_SHIFT = 12582912.0 + 127.0
_EXPONENT_COEFFICIENTS = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def sample_tokens(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """The tokens of all rows, int64 [rows].

    logits: float32 [rows, vocab]. parameters: float64 [rows, 5], the `SamplingRule`s.
    """
    temperature, top_k, top_p, min_p, uniform = parameters.unsqueeze(-1).unbind(1)
    token_ids = logits.argmax(-1, keepdim=True)
    largest = logits.gather(1, token_ids)
    is_first = (top_k == 1) | ~largest.isfinite()
    weights = _weights(logits - largest.where(~is_first, 0.0), (1 / temperature).float())
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    in_units = _in_units(ordered) * ((places < top_k) | (top_k == 0))
    enough = (top_p * in_units.sum(-1, keepdim=True).double()).ceil().long().clamp(min=1)
    is_left = (in_units.cumsum(-1) - in_units < enough) | (top_p >= 1)
    is_left &= ordered >= min_p.float()
    sums = torch.zeros_like(in_units).scatter_(1, order, in_units * is_left).cumsum(-1)
    whole = sums[:, -1:].contiguous()
    wanted = (uniform * whole.double()).long().minimum(whole - 1)
    drawn = torch.searchsorted(sums, wanted, right=True)
    return torch.where(is_first, token_ids, drawn).squeeze(1)


def _in_units(weights: torch.Tensor) -> torch.Tensor:
    return (weights.double() * _UNITS).long()


def _weights(below: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The weights of logits, by their distance below the largest logit."""
    x = below * factor
    shifted = _fma(x, 1.44269504, _SHIFT)
    n = shifted - _SHIFT
    r = _fma(n, 2.12194440e-4, _fma(n, -0.693359375, x))
    p = torch.full_like(r, 1.9875691500e-4)
    for coefficient in _EXPONENT_COEFFICIENTS:
        p = _fma(p, r, coefficient)
    power = (shifted.view(torch.int32) << 23).view(torch.float32)
    weights = torch.where(x < -87.0, 0.0, _fma(p, r * r, r + 1.0) * power)
    return torch.where(weights < _ROUNDED, (weights + _ROUND_TO_UNIT) - _ROUND_TO_UNIT, weights)


def _fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """a * b + c rounded to float32: in float64 the product is exact, and the sum nearly always."""
    return (a.double() * _as_float32(b) + _as_float32(c)).float()


def _as_float32(value: torch.Tensor | float) -> torch.Tensor | float:
    """The value as float64. A constant is first rounded to float32, as in the float32 steps."""
    return value.double() if isinstance(value, torch.Tensor) else float(np.float32(value))
