"""How the token of a row is chosen: `SamplingRule`, and the numbers that all implementations share."""

from __future__ import annotations

from typing import NamedTuple

import torch

WEIGHT_UNIT = 2.0**-34
"""The most probable token weighs 1, which is so many of these that 2^29 tokens have a sum in 64 bits."""


class SamplingRule(NamedTuple):
    """How the token of one row is chosen: of the tokens top_k leaves, top_p leaves some, and of these min_p.

    temperature: positive; logits are divided by it. top_k: so many of the most probable tokens, of equally probable
    ones those with the smaller ids, 0 for all, 1 for the first of the most probable. top_p: the smallest set of the
    most probable whose probability reaches it. min_p: those at least so many times as probable as the most probable
    one. uniform: in [0, 1); the token is where the weights of the tokens left, added up in the order of token ids,
    first exceed this share of their sum.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


def check_arguments(logits: torch.Tensor, parameters: torch.Tensor) -> None:
    """Raise RuntimeError for arguments that are not of the operator's shapes and dtypes."""
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1 or logits.dtype != torch.float32:
        raise RuntimeError(f"logits must be float32 [rows, vocab], not {logits.dtype} {list(logits.shape)}")
    expected = (logits.shape[0], len(SamplingRule._fields))
    if parameters.shape != expected or not parameters.is_contiguous() or parameters.dtype != torch.float64:
        found = f"{parameters.dtype} {list(parameters.shape)}"
        raise RuntimeError(f"parameters must be float64 {list(expected)}, not {found}")
