"""Penalties and bans for tokens that the host may not know yet. They change logits in place, on a GPU by a kernel each.

On a CPU the reference computes. The results have the bits of `multilora_engine.sampling.logits`.
"""

from __future__ import annotations

import torch

from multilora_kernels.dispatch import operator
from multilora_kernels.penalties_reference import LARGEST_LOGIT

__all__ = ["LARGEST_LOGIT", "forbid_tokens", "penalise_tokens"]


def penalise_tokens(
    logits: torch.Tensor,
    counts: torch.Tensor,
    places: torch.Tensor,
    last_token_ids: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """Count the last token of some rows, then lower the logits of the tokens that occur in these rows.

    logits: float32 [rows, vocab], contiguous along a row, changed in place.
    counts: int32 [places, vocab], changed in place: for each token twice how often the answer has it, and 1 more if the
        prompt has it.
    places: int64 [3, n]: rows of the logits, each once; their places in `counts`; 1 if the last token is yet to be
        counted as one of the answer, 0 if it is counted.
    last_token_ids: int64 [rows].
    penalties: float64 [n, 3]: of repetition (1 is none), presence and frequency (0 is none).

    A logit x of a token of the row becomes x / repetition, or x * repetition below zero, and then
    x - (frequency * its count in the answer + presence) if the answer has it; both within +-LARGEST_LOGIT.
    """
    operator("penalise_tokens", logits)(logits, counts, places, last_token_ids, penalties)


def forbid_tokens(logits: torch.Tensor, bans: torch.Tensor, last_token_ids: torch.Tensor) -> None:
    """Make logits -inf.

    logits, last_token_ids: as for `penalise_tokens`. bans: int64 [3, n]: a row, a forbidden token, and the last token
    after which it is forbidden, or -1 for any.
    """
    operator("forbid_tokens", logits)(logits, bans, last_token_ids)
