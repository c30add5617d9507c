"""Finds the scale and the zero point with which a group of weights loses least when it is rounded to codes.

A group is `group_size` neighbouring inputs of one output. It keeps w as q with w ~ s (q - z): s is its scale, z its
zero point (0 if the scheme is symmetric), and q the code nearest to w / s + z. The loss is

    E(s, z) = sum_i h_i (w_i - s (q_i - z))^2

with h_i the importance of input i: the mean square of its activations, or 1. If inputs are uncorrelated, this is the
mean square of the group's error in its output.

For given codes the best scale is s = sum h w (q - z) / sum h (q - z)^2. So a few scales and zero points are tried. Each
is replaced by the best scale for its codes, and the best of all is refined. A scale may be negative: the integers of b
bits reach from -2^(b-1) to 2^(b-1) - 1, and the longer side should meet the group's largest weight, of either sign.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

_CPU_CHUNK_ELEMENTS = (1 << 15) - 1
"""How many weights are searched at once. They fit a core's cache, and are too few for PyTorch to use several threads:
hundreds of thousands of small operations would wait for threads longer than they compute."""

_GPU_CHUNK_ELEMENTS = 1 << 25

_NUM_RATIOS = 16
_NUM_REFINEMENTS = 2
_LEAST_IMPORTANCE = 1e-4
"""The least importance, as a part of the mean, so that an input that calibration never saw active still counts."""


class Codes(Protocol):
    """The codes of a type: the values that a weight can take before its scale."""

    @property
    def lowest(self) -> float: ...

    @property
    def highest(self) -> float: ...

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        """The codes nearest to `values`, as float32. `values` may be overwritten."""
        ...


@dataclass(frozen=True)
class IntegerCodes:
    """The integers of `bits` bits, from -2^(bits-1) to 2^(bits-1) - 1."""

    bits: int

    @property
    def lowest(self) -> float:
        return -(2.0 ** (self.bits - 1))

    @property
    def highest(self) -> float:
        return 2.0 ** (self.bits - 1) - 1

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        return values.round_().clamp_(self.lowest, self.highest)


@dataclass(frozen=True)
class Float8Codes:
    """The values of float8_e4m3fn."""

    lowest: float = torch.finfo(torch.float8_e4m3fn).min
    highest: float = torch.finfo(torch.float8_e4m3fn).max

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        return values.clamp_(self.lowest, self.highest).to(torch.float8_e4m3fn).float()


def search_scales(
    weight: torch.Tensor,
    importance: torch.Tensor | None,
    codes: Codes,
    group_size: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scales and zero points of a linear's weight. For no group are they worse than `min_max_scales`.

    Args:
        weight: [outputs, inputs], finite, of any float dtype.
        importance: [inputs] float32, not negative; None weighs all inputs alike.
        group_size: Divides inputs.
        scale_dtype: A scale is rounded to it before it is judged, so that storing it loses nothing.

    Returns:
        scales [outputs, inputs / group_size] in scale_dtype, and zero points of the same shape, integers in float32,
        None when symmetric.
    """
    num_outputs, num_inputs = weight.shape
    assert num_inputs % group_size == 0
    num_groups = num_inputs // group_size
    h = _group_importance(importance, num_groups, group_size, weight.device)
    chunk_elements = _CPU_CHUNK_ELEMENTS if weight.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    rows = max(1, chunk_elements // num_inputs)
    found = [
        _search(chunk.float().view(-1, num_groups, group_size), h, codes, symmetric, scale_dtype)
        for chunk in weight.split(rows)
    ]
    scales = torch.cat([scale for scale, _ in found]).view(num_outputs, num_groups)
    zeros = torch.cat([zero for _, zero in found]).view(num_outputs, num_groups)
    return scales.to(scale_dtype), None if symmetric else zeros


def min_max_scales(
    w: torch.Tensor, codes: Codes, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and zero point with which the codes just span a group, as compressed-tensors computes them.

    w: [..., group_size] float32. Returns two of [..., 1] float32.
    """
    least, most = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
    span = codes.highest - codes.lowest
    if symmetric:
        scale = _storable(torch.maximum(most, -least) / (span / 2), scale_dtype)
        return scale, torch.zeros_like(scale)
    scale = _not_zero((most - least) / span)
    zero = (codes.lowest - least / scale).round().clamp(codes.lowest, codes.highest)
    return _storable(scale, scale_dtype), zero


def _group_importance(
    importance: torch.Tensor | None, num_groups: int, group_size: int, device: torch.device
) -> torch.Tensor:
    """The importance of each input, [num_groups, group_size] float32, nowhere 0."""
    if importance is None:
        return torch.ones(num_groups, group_size, device=device)
    h = importance.to(device, torch.float32)
    mean = h.mean()
    h = h.clamp(min=_LEAST_IMPORTANCE * mean) / mean if mean > 0 else torch.ones_like(h)
    return h.view(num_groups, group_size)


def _search(
    w: torch.Tensor, h: torch.Tensor, codes: Codes, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`search_scales` of float32 groups w [rows, num_groups, group_size]; both results [rows, num_groups, 1]."""
    hw = h * w
    best_gain: torch.Tensor | None = None
    for scale, zero in _candidates(w, codes, symmetric):
        refitted, gain = _refit(_offsets(w, scale, zero, codes), hw, h)
        if best_gain is None:
            best_gain, best_scale, best_zero = gain, refitted, zero
        is_better = gain > best_gain
        best_gain = torch.where(is_better, gain, best_gain)
        best_scale = torch.where(is_better, refitted, best_scale)
        best_zero = torch.where(is_better, zero, best_zero)

    scale, zero = min_max_scales(w, codes, symmetric, scale_dtype)
    loss = _loss(w, h, scale, zero, codes)
    trial = _storable(best_scale, scale_dtype)
    for _ in range(1 + _NUM_REFINEMENTS):
        trial_loss = _loss(w, h, trial, best_zero, codes)
        is_better = trial_loss < loss
        loss = torch.where(is_better, trial_loss, loss)
        scale = torch.where(is_better, trial, scale)
        zero = torch.where(is_better, best_zero, zero)
        refitted, _ = _refit(_offsets(w, trial, best_zero, codes), hw, h)
        trial = _storable(refitted, scale_dtype)
    return scale, zero


def _candidates(w: torch.Tensor, codes: Codes, symmetric: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scales and zero points to try, each [..., 1].

    Symmetric: the largest weight, with its sign, goes to 0.9 .. 1.6 times the lowest code, so that it is clipped more
    and more. Asymmetric: the codes span 0.55 .. 1.05 of the group's range, around its middle.
    """
    if symmetric:
        largest = w.gather(-1, w.abs().argmax(-1, keepdim=True))
        if codes.highest == -codes.lowest:
            largest = -largest.abs()
        zero = torch.zeros_like(largest)
        for ratio in torch.linspace(0.9, 1.6, _NUM_RATIOS).tolist():
            yield _not_zero(largest / (codes.lowest * ratio)), zero
        return
    least, most = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
    for ratio in torch.linspace(0.55, 1.05, _NUM_RATIOS).tolist():
        scale = _not_zero((most - least) * (ratio / (codes.highest - codes.lowest)))
        zero = (codes.lowest + codes.highest) / 2 - (least + most) / (2 * scale)
        for rounded in (zero.floor(), zero.ceil()):
            yield scale, rounded.clamp(codes.lowest, codes.highest)


def _offsets(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, codes: Codes) -> torch.Tensor:
    """q - z for the codes q nearest to the groups w. It divides, as compressed-tensors does, to get the same codes."""
    return codes.nearest((w / scale).add_(zero)).sub_(zero)


def _refit(offsets: torch.Tensor, hw: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best scale for the codes, and how much smaller its loss is than the loss of a group of zeros."""
    along = (hw * offsets).sum(-1, keepdim=True)
    square = offsets.square_().mul_(h).sum(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
    return along / square, along.square() / square


def _loss(w: torch.Tensor, h: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, codes: Codes) -> torch.Tensor:
    return _offsets(w, scale, zero, codes).mul_(scale).sub_(w).square_().mul_(h).sum(-1, keepdim=True)


def _storable(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale rounded to `dtype`, as float32. It is never 0, because values are divided by it.

    It may be below float16's normal numbers: 8 bits need this for weights with a standard deviation below 0.002. It is
    always a normal number of float32, because a processor may take smaller numbers for 0.
    """
    numbers = torch.finfo(dtype)
    return _not_zero(scale.to(dtype).float(), max(numbers.tiny * numbers.eps, torch.finfo(torch.float32).tiny))


def _not_zero(scale: torch.Tensor, least: float = torch.finfo(torch.float32).tiny) -> torch.Tensor:
    return torch.where(scale.abs() < least, torch.full_like(scale, least), scale)
