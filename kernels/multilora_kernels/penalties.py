"""Penalties and bans by tokens that the host may not know yet: changes of logits in place, one launch each on a GPU.

A CPU gets the reference. The numbers are those of `multilora_engine.sampling.logits`, bit for bit.
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
    """Count the last tokens of some rows, then lower the logits of the tokens that these rows have.

    logits: float32 [rows, vocab], contiguous along a row, changed in place.
    counts: int32 [places, vocab], changed in place: for each token twice how often the answer has it, and 1 more if the
        prompt has it.
    places: int64 [3, n]: rows of the logits, each once; their places in `counts`; 1 where the last token is to be
        counted, as one of the answer, and 0 where it was.
    last_token_ids: int64 [rows].
    penalties: float64 [n, 3]: of repetition (1 is none), presence and frequency (0 is none).

    A logit x of a token of the row becomes x / repetition, or x * repetition below zero, and then
    x - (frequency * its count in the answer + presence) if the answer has it; both within +-LARGEST_LOGIT.
    """
    operator("penalise_tokens", logits)(logits, counts, places, last_token_ids, penalties)


def forbid_tokens(logits: torch.Tensor, bans: torch.Tensor, last_token_ids: torch.Tensor) -> None:
    """Make logits -inf.

    logits: as of `penalise_tokens`. bans: int64 [3, n]: a row, a token, and the last token behind which the row may not
    have it, or -1 for all. last_token_ids: int64 [rows].
    """
    operator("forbid_tokens", logits)(logits, bans, last_token_ids)
