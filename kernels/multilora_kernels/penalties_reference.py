"""`penalise_tokens` and `forbid_tokens` in plain PyTorch: the oracle of the self-test, and the path of a CPU."""

from __future__ import annotations

import torch

LARGEST_LOGIT = 1e30
"""Changed logits stay within +-LARGEST_LOGIT: an overflow to infinity would be NaN as soon as two are subtracted."""


def penalise_tokens(
    logits: torch.Tensor,
    counts: torch.Tensor,
    places: torch.Tensor,
    last_token_ids: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """See `multilora_kernels.penalties.penalise_tokens`."""
    rows, of_counts, is_counted = places
    counts.index_put_((of_counts, last_token_ids[rows]), 2 * is_counted.int(), accumulate=True)
    count = counts[of_counts]
    repetition, presence, frequency = penalties.unsqueeze(-1).unbind(1)
    x, factor = logits[rows], repetition.float()
    repeated = torch.where(x < 0, x * factor, x / factor).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    x = torch.where((count > 0) & (factor != 1), repeated, x)
    lowered = (x - (frequency * (count >> 1) + presence).float()).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    logits[rows] = torch.where((count >= 2) & ((presence != 0) | (frequency != 0)), lowered, x)


def forbid_tokens(logits: torch.Tensor, bans: torch.Tensor, last_token_ids: torch.Tensor) -> None:
    """See `multilora_kernels.penalties.forbid_tokens`."""
    rows, token_ids, triggers = bans
    is_forbidden = (triggers < 0) | (triggers == last_token_ids[rows])
    logits[rows[is_forbidden], token_ids[is_forbidden]] = -torch.inf
