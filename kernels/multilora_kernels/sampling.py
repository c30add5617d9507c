"""The choice of tokens from logits on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from multilora_kernels.cpu import load_cpu_kernels


class SamplingRule(NamedTuple):
    """How the token of one row is chosen: of the tokens top_k leaves, top_p leaves some, and of these min_p.

    temperature: positive; logits are divided by it. top_k: so many of the most probable tokens, 0 for all, 1 for the
    first of the most probable. top_p: the smallest set of the most probable whose probability reaches it. min_p: those
    at least so many times as probable as the most probable one. uniform: in [0, 1); the token is where the
    probabilities of the tokens left, added up in the order of token ids, first exceed this share of their sum.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


def sample_tokens(logits: torch.Tensor, rules: list[SamplingRule]) -> torch.Tensor | None:
    """The tokens of all rows, int64 [rows]; None where there are no compiled kernels.

    logits: float32 [rows, vocab] on the CPU, contiguous along a row, with a rule each; RuntimeError otherwise. A row's
    token depends on its own logits and rule alone. Of a row where every logit is -inf it is any.
    """
    if not load_cpu_kernels():
        return None
    parameters = torch.tensor(rules, dtype=torch.float64).view(len(rules), len(SamplingRule._fields))
    return torch.ops.multilora.sample_tokens(logits, parameters)  # type: ignore[no-any-return]
