"""Rotary position embeddings, and the scalings that stretch them beyond the length a checkpoint was trained on.

A head's dimensions i and i + head_dim / 2 form a pair, which position p turns by the angle p * f[i], with the inverse
wavelengths f[i] = theta ^ (-2 i / head_dim). Scalings change f. References: RoFormer (arXiv 2104.09864), position
interpolation (`linear`, arXiv 2306.15595), NTK-aware scaling (`dynamic`), YaRN (arXiv 2309.00071), Llama 3.1
(`llama3`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from multilora_engine.execution.forward_batch import ForwardBatch
from multilora_engine.execution.transfer import to_device
from multilora_engine.models.model_config import ModelConfig


@dataclass(frozen=True)
class Rotation:
    """The angles of one step's tokens: cos, sin [num_tokens, 1, head_dim]; the first half of `sin` is negated."""

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the halves of every head. x: [tokens, heads, head_dim]."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


class RotaryEmbedding:
    """Angles from positions, computed in float32 once per step (a table of all positions would be large and no faster).

    `dynamic` depends on how long the sequence is by now: its tokens of this step are turned by the frequencies of
    max(context length after this step, max_position_embeddings), and keys cached earlier keep the angle they were
    stored with, as in transformers. So beyond max_position_embeddings (and only there) the result of a `dynamic`
    checkpoint depends on how its prompt was cut into chunks.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        scaling = config.rope_scaling or {"rope_type": "default"}
        self._config = config
        self._is_dynamic = scaling["rope_type"] == "dynamic"
        self._frequencies = _of_both_halves(_FREQUENCIES[scaling["rope_type"]](config, scaling)).to(device)
        self._scale = _yarn_attention_factor(scaling) if scaling["rope_type"] == "yarn" else 1.0

    def rotation(self, batch: ForwardBatch, dtype: torch.dtype) -> Rotation:
        """The angles of the batch's tokens, in the type of the queries and keys."""
        frequencies = _of_both_halves(self._dynamic_frequencies(batch)) if self._is_dynamic else self._frequencies
        angles = (batch.positions[:, None].float() * frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        return Rotation(cos.to(dtype), sin.to(dtype))

    def _dynamic_frequencies(self, batch: ForwardBatch) -> torch.Tensor:
        """[num_tokens, head_dim / 2]: each token by the context length of its sequence."""
        config = self._config
        assert config.rope_scaling is not None
        per_token = batch.num_keys.clamp(min=config.max_position_embeddings).float()
        device = per_token.device
        if len(batch.query_lens) < len(batch.positions):
            query_lens = to_device(torch.tensor(batch.query_lens), device)
            # With its size told, the result is allocated without waiting for the device.
            per_token = per_token.repeat_interleave(query_lens, output_size=len(batch.positions))
        factor, dim = config.rope_scaling["factor"], config.head_dim
        stretch = factor * per_token / config.max_position_embeddings - (factor - 1)
        return _inverse_powers(config.rope_theta * stretch[:, None] ** (dim / (dim - 2)), dim, device)


def _of_both_halves(frequencies: torch.Tensor) -> torch.Tensor:
    """Of all dimensions of a head: the first half turns the other way, whose cosines are the same and sines negated."""
    return torch.cat((-frequencies, frequencies), -1)


def _inverse_powers(theta: torch.Tensor | float, dim: int, device: torch.device | None = None) -> torch.Tensor:
    """theta ^ (-2 i / dim), i = 0 .. dim / 2 - 1."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    # Not theta ^ -exponent: the last bit counts at positions beyond 100,000, and checkpoints are trained with this one.
    return torch.reciprocal(torch.pow(theta, exponents))


def _default(config: ModelConfig, _scaling: Mapping[str, Any]) -> torch.Tensor:
    return _inverse_powers(config.rope_theta, config.head_dim)


def _linear(config: ModelConfig, scaling: Mapping[str, Any]) -> torch.Tensor:
    return _default(config, scaling).div(scaling["factor"])


def _llama3(config: ModelConfig, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Low frequencies are divided by `factor`, high ones kept, those between mixed by their turns per context."""
    frequencies = _default(config, scaling)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(frequencies / scaling["factor"], frequencies, kept)


def _yarn(config: ModelConfig, scaling: Mapping[str, Any]) -> torch.Tensor:
    """As `llama3`, but the mix is linear in the dimension, between those of `beta_fast` and `beta_slow` turns."""
    frequencies = _default(config, scaling)
    first, last = _yarn_range(config, scaling)
    ramp = (torch.arange(config.head_dim // 2, dtype=torch.float32) - first) / ((last - first) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return torch.lerp(frequencies / scaling["factor"], frequencies, kept)


def _yarn_range(config: ModelConfig, scaling: Mapping[str, Any]) -> tuple[float, float]:
    """The dimensions that make `beta_fast` and `beta_slow` turns over the original context."""

    def dimension(turns: float) -> float:
        wavelength = scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first, last = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, config.head_dim - 1)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """YaRN's temperature, applied to cos and sin: 0.1 ln(factor) + 1 unless the checkpoint says otherwise."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return temperature(1.0)


_FREQUENCIES: dict[str, Callable[[ModelConfig, Mapping[str, Any]], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}
