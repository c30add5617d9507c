"""Rotary position embeddings, and the scalings that stretch them beyond the length a checkpoint was trained on.

Elements i and i + n / 2 of the n that turn in each head form a pair (2i and 2i + 1 where they are interleaved), which
position p turns by the angle p * f[i], with the inverse wavelengths f[i] = theta ^ (-2 i / n). Scalings change f.
References: RoFormer (arXiv 2104.09864), position interpolation (`linear`, arXiv 2306.15595), NTK-aware scaling
(`dynamic`), YaRN (arXiv 2309.00071), Llama 3.1 (`llama3`), LongRoPE (arXiv 2402.13753).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from multilora_engine.batch.forward_batch import ForwardBatch
from multilora_engine.batch.transfer import to_device
from multilora_engine.models.rope_config import Rope
from multilora_kernels import rotary_angles


@dataclass(frozen=True)
class Rotation:
    """The angles of one step's tokens: cos, sin [num_tokens, 1, rotary_dim]; the first sin of a pair is negated.

    A head's elements from rotary_dim on stay as they are; 0 of a layer without rotary embeddings.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool = False

    @classmethod
    def none(cls, batch: ForwardBatch, dtype: torch.dtype) -> Rotation:
        """Every head stays as it is."""
        nothing = torch.empty(len(batch.positions), 1, 0, dtype=dtype, device=batch.positions.device)
        return cls(nothing, nothing)

    def replace(self, rows: torch.Tensor, other: Rotation) -> None:
        """Take the angles of some of the step's tokens, `rows` [any] int64, from another rotation of all of them."""
        for mine, others in ((self.cos, other.cos), (self.sin, other.sin)):
            mine.index_copy_(0, rows, others.index_select(0, rows))


class RotaryEmbedding:
    """Angles from positions, computed in float32 once per step (a table of all positions would be large and no faster).

    `dynamic` depends on how long the sequence is by now: its tokens of this step are turned by the frequencies of
    max(context length after this step, max_position_embeddings), and keys cached earlier keep the angle they were
    stored with, as in transformers. So beyond max_position_embeddings (and only there) the result of a `dynamic`
    checkpoint depends on how its prompt was cut into chunks.

    `longrope` has two sets of frequencies. All sequences are turned by the long ones if any may become longer than
    original_max_position_embeddings: keys in the cache serve sequences of any length. transformers chooses by each
    sequence's length.
    """

    def __init__(self, rope: Rope, device: torch.device, max_model_len: int | None = None) -> None:
        """max_model_len: tokens of the longest sequence; None is `max_position_embeddings`."""
        scaling = dict(rope.scaling or {"rope_type": "default"})
        scaling["max_model_len"] = max_model_len or rope.max_position_embeddings
        self._rope = rope
        self._is_dynamic = scaling["rope_type"] == "dynamic"
        self._frequencies = self._of_pairs(_FREQUENCIES[scaling["rope_type"]](rope, scaling)).to(device)
        self._scale = _SCALES.get(scaling["rope_type"], _no_scale)(rope, scaling)

    def rotation(self, batch: ForwardBatch, dtype: torch.dtype) -> Rotation:
        """The angles of the batch's tokens, in the type of the queries and keys."""
        if self._scale == 1.0 and dtype != torch.float32:
            # A GPU rounds as it stores, in the same launch.
            angles = self._angles(batch)
            cos, sin = (angles.new_empty(angles.shape, dtype=dtype) for _ in range(2))
            torch.cos(angles, out=cos)
            torch.sin(angles, out=sin)
        elif self._is_dynamic:
            angles = self._angles(batch)
            cos, sin = angles.cos(), angles.sin()
        else:
            cos, sin = rotary_angles(batch.positions, self._frequencies)
        if self._scale != 1.0:
            cos, sin = ((part * self._scale).to(dtype) for part in (cos, sin))
        return Rotation(cos, sin, self._rope.is_interleaved)

    def _angles(self, batch: ForwardBatch) -> torch.Tensor:
        """[num_tokens, 1, rotary_dim]"""
        frequencies = (
            self._of_pairs(self._dynamic_frequencies(batch))[:, None] if self._is_dynamic else self._frequencies
        )
        # An integer times a float32 is a product of float32, without a conversion before it.
        return batch.positions.view(-1, 1, 1) * frequencies

    def _dynamic_frequencies(self, batch: ForwardBatch) -> torch.Tensor:
        """[num_tokens, rotary_dim / 2]: each token by the context length of its sequence."""
        rope = self._rope
        assert rope.scaling is not None
        per_token = batch.num_keys.clamp(min=rope.max_position_embeddings).float()
        device = per_token.device
        if len(batch.query_lens) < len(batch.positions):
            query_lens = to_device(torch.tensor(batch.query_lens), device)
            # With its size told, the result is allocated without waiting for the device.
            per_token = per_token.repeat_interleave(query_lens, output_size=len(batch.positions))
        factor, dim = rope.scaling["factor"], rope.rotary_dim
        stretch = factor * per_token / rope.max_position_embeddings - (factor - 1)
        return _inverse_powers(rope.theta * stretch[:, None] ** (dim / (dim - 2)), dim, device)

    def _of_pairs(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Frequencies of all elements; the first of a pair turns the other way, and only its sine tells."""
        if self._rope.is_interleaved:
            return torch.stack((-frequencies, frequencies), -1).flatten(-2)
        return torch.cat((-frequencies, frequencies), -1)


def _inverse_powers(theta: torch.Tensor | float, dim: int, device: torch.device | None = None) -> torch.Tensor:
    """theta ^ (-2 i / dim), i = 0 .. dim / 2 - 1."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    # Not theta ^ -exponent: the last bit counts at positions beyond 100,000, and checkpoints are trained with this one.
    return torch.reciprocal(torch.pow(theta, exponents))


def _default(rope: Rope, _scaling: Mapping[str, Any]) -> torch.Tensor:
    return _inverse_powers(rope.theta, rope.rotary_dim)


def _linear(rope: Rope, scaling: Mapping[str, Any]) -> torch.Tensor:
    return _default(rope, scaling).div(scaling["factor"])


def _llama3(rope: Rope, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Low frequencies are divided by `factor`, high ones kept, those between mixed by their turns per context."""
    frequencies = _default(rope, scaling)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(frequencies / scaling["factor"], frequencies, kept)


def _yarn(rope: Rope, scaling: Mapping[str, Any]) -> torch.Tensor:
    """The mix of `llama3`, but linear in the dimension, between those of `beta_fast` and `beta_slow` turns."""
    frequencies = _default(rope, scaling)
    first, last = _yarn_range(rope, scaling)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - first) / ((last - first) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return torch.lerp(frequencies / scaling["factor"], frequencies, kept)


def _yarn_range(rope: Rope, scaling: Mapping[str, Any]) -> tuple[float, float]:
    """The dimensions that make `beta_fast` and `beta_slow` turns over the original context."""

    def dimension(turns: float) -> float:
        wavelength = scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, rope.rotary_dim - 1)


def _yarn_scale(_rope: Rope, scaling: Mapping[str, Any]) -> float:
    """YaRN's temperature, applied to cos and sin: 0.1 ln(factor) + 1 unless the checkpoint says otherwise."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return temperature(1.0)


def _longrope(rope: Rope, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Each pair's frequency is divided by a factor of its own; longer sequences have other factors."""
    is_long = scaling["max_model_len"] > scaling["original_max_position_embeddings"]
    factors = torch.tensor(scaling["long_factor" if is_long else "short_factor"], dtype=torch.float32)
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return torch.reciprocal(factors * torch.pow(rope.theta, exponents))


def _longrope_scale(rope: Rope, scaling: Mapping[str, Any]) -> float:
    """sqrt(1 + ln(stretch) / ln(original length)), applied to cos and sin, unless the checkpoint says otherwise."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    original = scaling["original_max_position_embeddings"]
    stretch = scaling.get("factor") or rope.max_position_embeddings / original
    return math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0


def _no_scale(_rope: Rope, _scaling: Mapping[str, Any]) -> float:
    return 1.0


_FREQUENCIES: dict[str, Callable[[Rope, Mapping[str, Any]], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}

_SCALES: dict[str, Callable[[Rope, Mapping[str, Any]], float]] = {"yarn": _yarn_scale, "longrope": _longrope_scale}
"""rope_type -> the factor of cos and sin."""
