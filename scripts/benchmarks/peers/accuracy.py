"""How far an engine's log-probabilities are from exact ones, as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from marked_tables import figure, markdown_table

OURS, THEIRS = "multilora, bfloat16", "vLLM, bfloat16"
"""The one is to be nearer than the other."""


@dataclass(frozen=True)
class Nearness:
    """Differences of natural logarithms, over `num_tokens` tokens. rms: the root of the mean of their squares."""

    peer: str
    rms: float
    largest: float
    num_tokens: int

    @classmethod
    def of(cls, peer: str, told: Sequence[Sequence[float]], exact: Sequence[Sequence[float]]) -> Nearness:
        """told, exact: of each text the log-probability of each token behind the first."""
        differences = [
            abs(one - other)
            for ours, theirs in zip(told, exact, strict=True)
            for one, other in zip(ours, theirs, strict=True)
        ]
        rms = math.sqrt(math.fsum(difference**2 for difference in differences) / len(differences))
        return cls(peer, rms, max(differences), len(differences))


def accuracy_table(measured: Sequence[Nearness]) -> str:
    """A row an engine. Ours in bfloat16 says so where it is not nearer than vLLM's."""
    rms = {row.peer: row.rms for row in measured}
    is_missed = OURS in rms and THEIRS in rms and rms[OURS] >= rms[THEIRS]
    rows = [
        (
            row.peer,
            f"{figure(row.rms)}{', missed' if is_missed and row.peer == OURS else ''}",
            figure(row.largest),
            f"{row.num_tokens:,}",
        )
        for row in measured
    ]
    root = f"root of the mean square (goal: {OURS}, below {THEIRS})"
    return markdown_table(("difference from float64", root, "largest", "tokens"), rows)
