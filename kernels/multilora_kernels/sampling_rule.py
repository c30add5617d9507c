"""How the token of a row is chosen: `SamplingRule`, and the numbers that all implementations share."""

from __future__ import annotations

from typing import NamedTuple

import torch

WEIGHT_UNIT = 2.0**-34
"""The unit of weights. The most probable token weighs 1. In this unit, the weights of 2^29 tokens add up in 64 bits."""


class SamplingRule(NamedTuple):
    """How the token of one row is chosen. First top_k drops tokens, then top_p, then min_p.

    temperature: positive; logits are divided by it.
    top_k: how many of the most probable tokens stay; 0 for all. Among equally probable tokens, smaller ids stay.
    top_p: the smallest set of the most probable tokens stays whose probability reaches top_p.
    min_p: tokens stay whose probability is at least min_p times the largest one.
    uniform: in [0, 1). The weights of the remaining tokens are added up in the order of their ids. The token is chosen
        at which the sum first exceeds this share of the whole.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


def check_arguments(logits: torch.Tensor, parameters: torch.Tensor) -> None:
    """Raises RuntimeError if an argument has another shape or dtype than the operator takes."""
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1 or logits.dtype != torch.float32:
        raise RuntimeError(f"logits must be float32 [rows, vocab], not {logits.dtype} {list(logits.shape)}")
    expected = (logits.shape[0], len(SamplingRule._fields))
    if parameters.shape != expected or not parameters.is_contiguous() or parameters.dtype != torch.float64:
        found = f"{parameters.dtype} {list(parameters.shape)}"
        raise RuntimeError(f"parameters must be float64 {list(expected)}, not {found}")
