"""`PromptWaits`: how long prompts have waited, and which of them have waited longer than a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, islice, takewhile

from multilora_engine.engine.engine_stats import PromptWaitStats
from multilora_engine.sequences.sequence import Sequence

MAX_PROMPT_WAIT_S = 10.0
"""A prompt that waits longer goes before later ones; a step may take as long as the targets of `Pace` allow."""


class PromptWaits:
    """The sequences whose prompts are not computed, in the order in which they came, and the times since then.

    The time in which a sequence is parked, for an adapter from a source or for a guide, does not count.
    """

    def __init__(self, bound_s: float = MAX_PROMPT_WAIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        """A sequence is late when it has waited for more than `bound_s` seconds of the clock."""
        self._bound_s = bound_s
        self._clock = clock
        self._since: dict[Sequence, float] = {}
        self._late: dict[Sequence, float] = {}
        self._num_late = 0

    @property
    def stats(self) -> PromptWaitStats:
        # The late ones came before all others.
        since = next(iter((self._late or self._since).values()), None)
        return PromptWaitStats(0.0 if since is None else self._clock() - since, self._num_late)

    @property
    def has_late(self) -> bool:
        """Whether any sequence is late."""
        return bool(self._late)

    def burst(self, answers: list[Sequence], max_num_seqs: int) -> list[Sequence]:
        """The prompts that arrived before the first of the running answers began, as many as may run with these."""
        # An answer whose first token is not chosen yet has no time.
        start_ns = min((answer.times.first_token_ns for answer in answers if answer.times.first_token_ns), default=0)
        came_before = takewhile(lambda one: one.times.arrival_ns < start_ns, chain(self._late, self._since))
        # One that lacks a single token is scheduled with the answers.
        prompts = (one for one in came_before if one.num_missing_tokens > 1)
        return list(islice(prompts, max_num_seqs - len(answers)))

    def add(self, sequence: Sequence) -> None:
        """A sequence waits from now on."""
        self._since[sequence] = self._clock()

    def discard(self, sequence: Sequence) -> None:
        """The prompt of a sequence is computed, or it has ended."""
        if self._since.pop(sequence, None) is None:
            self._late.pop(sequence, None)

    def take_late(self) -> list[Sequence]:
        """The sequences that are late now and were not when this was called last."""
        end_s = self._clock() - self._bound_s
        late = []
        for sequence, since in self._since.items():
            if since >= end_s:
                break
            late.append(sequence)
        for sequence in late:
            self._late[sequence] = self._since.pop(sequence)
        self._num_late += len(late)
        return late
