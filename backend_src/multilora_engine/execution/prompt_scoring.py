"""How likely the tokens of a step's prompts were, from logits that exist a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from multilora_engine.batch.transfer import to_device
from multilora_engine.sequences.prompt_log_probs import PromptLogProbs
from multilora_engine.sequences.scheduled_sequence import ScheduledSequence
from multilora_engine.sequences.sequence import Sequence

_ROWS_AT_ONCE = 64
"""The rows of logits of one product: more would take memory, fewer would read the head's weights more often."""


def scores_prompts(step: list[ScheduledSequence]) -> bool:
    """Whether the log-probs of any prompt's tokens follow from this step."""
    return any(scheduled.scored_positions for scheduled in step)


def score_prompts(
    step: list[ScheduledSequence], logits_of: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> None:
    """Append the step's values to the `prompt_log_probs` of its sequences. Waits for the device.

    logits_of: float32 [n, vocab] of rows of the step's batch, int64 [n] on the device.
    """
    scored = _scored(step)
    num_top = max(log_probs.num_top for _, log_probs, _ in scored)
    numbers = to_device(_rows_and_next_tokens(step), device)
    pieces = [
        _log_probs(logits_of(rows), token_ids, num_top)
        for rows, token_ids in zip(*(column.split(_ROWS_AT_ONCE) for column in numbers), strict=True)
    ]
    _keep(scored, *(torch.cat(column).cpu().numpy() for column in zip(*pieces, strict=True)))


def _scored(step: list[ScheduledSequence]) -> list[tuple[Sequence, PromptLogProbs, range]]:
    """The reports that the step adds to, and the positions of their new values."""
    return [
        (scheduled.sequence, scheduled.sequence.prompt_report.log_probs, positions)
        for scheduled in step
        if scheduled.sequence.prompt_report.log_probs is not None and (positions := scheduled.scored_positions)
    ]


def _rows_and_next_tokens(step: list[ScheduledSequence]) -> torch.Tensor:
    """int64 [2, n]: the row of each scored position in the step's batch, and the token behind it."""
    rows, token_ids, end = [], [], 0
    for scheduled in step:
        positions = scheduled.scored_positions
        rows += [end + position - scheduled.start for position in positions]
        token_ids += scheduled.sequence.request.prompt_token_ids[positions.start + 1 : positions.stop + 1]
        end += scheduled.num_tokens
    return torch.tensor([rows, token_ids])


def _log_probs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of a token a row, float32 [n]; log-probs and ids of the likeliest tokens, [n, num_top], best first."""
    whole = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - whole
    top = logits.topk(num_top, dim=-1)
    return chosen.squeeze(1), top.values - whole, top.indices


def _keep(
    scored: list[tuple[Sequence, PromptLogProbs, range]],
    values: NDArray[Any],
    top_values: NDArray[Any],
    top_ids: NDArray[Any],
) -> None:
    """Hand each prompt its rows, cut to as many of the likeliest as it asked for."""
    end = 0
    for sequence, log_probs, positions in scored:
        start, end = end, end + len(positions)
        top = (slice(start, end), slice(log_probs.num_top))
        try:
            log_probs.append(values[start:end], top_values[top], top_ids[top])
        except Exception as error:
            sequence.failure = error
