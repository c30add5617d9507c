"""`PaddedTimes`: how long steps take on a device that replays steps with prompts at captured sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from multilora_engine.engine.pace import StepTimes, StepWork

_BEYOND = 512
"""Tokens between two sizes after the captured ones; their times are known by themselves, too."""

_WEIGHT = 0.3
"""Of the newest step in the average of a size, if it took less. One that took more counts alone."""

_FADING = 0.998
"""What a step leaves of the known times of all other sizes. A size that chance made dear is tried again some day."""

_MAX_SURPRISE = 2.0
"""A step counts as no longer than so many times the expected time, as of `StepTimes`."""


class PaddedTimes(StepTimes):
    """A step with prompts is padded to the next of `sizes`, and takes its time. Beyond the largest, a step is launched
    kernel by kernel, and may take longer than its tokens tell.

    So the seconds that prompts add to a step are measured for each size by itself, and nothing is said of how they
    grow. Between measured sizes they lie on a line. A size below all of these is expected to take as long as the
    smallest; one above all of them as if half of the time of the largest grew with the tokens.
    """

    def __init__(self, sizes: Sequence[int], max_num_tokens: int) -> None:
        """sizes: tokens of the captured steps with prompts, ascending. max_num_tokens: of any step."""
        super().__init__()
        self._sizes = [*sizes, *range(sizes[-1] + _BEYOND, max_num_tokens, _BEYOND)]
        if self._sizes[-1] < max_num_tokens:
            self._sizes.append(max_num_tokens)
        self._more_s: dict[int, float] = {}

    def num_more(self, num_own: int, seconds: float) -> float:
        """All of the largest size that takes no longer. The smallest that has room is paid for with its first token."""
        sizes = self._sizes[self._place(num_own + 1) :]
        fitting = [size for size in sizes if self.more_s(size) <= seconds]
        chosen: int = fitting[-1] if fitting else sizes[0]
        return chosen - num_own

    def more_s(self, size: int) -> float:
        """The seconds that prompts are expected to add to a step of one of the sizes."""
        known = sorted(self._more_s)
        if not known:
            return size * self.token_s
        place = bisect_left(known, size)
        if place == len(known):
            return self._more_s[known[-1]] * (1 + size / known[-1]) / 2
        above = known[place]
        if above == size or place == 0:
            return self._more_s[above]
        below = known[place - 1]
        part = (size - below) / (above - below)
        return (1 - part) * self._more_s[below] + part * self._more_s[above]

    def observe(self, work: StepWork, seconds: float) -> None:
        if work.num_more and self.is_known:
            size = self._sizes[self._place(work.num_own + work.num_more)]
            own_s = self.own_s(work.num_own)
            more_s = max(0.0, seconds - own_s)
            if (known_s := self._more_s.get(size)) is not None:
                more_s = min(more_s, _MAX_SURPRISE * (own_s + known_s) - own_s)
                more_s = max(more_s, known_s + _WEIGHT * (more_s - known_s))
            self._more_s = {other: _FADING * other_s for other, other_s in self._more_s.items()}
            self._more_s[size] = more_s
        super().observe(work, seconds)

    def _place(self, num_tokens: int) -> int:
        """Of the size of a step. Prompts whose logits are wanted count more tokens than a step has."""
        return min(bisect_left(self._sizes, num_tokens), len(self._sizes) - 1)


def step_times(sizes: Sequence[int], max_num_tokens: int) -> StepTimes:
    """sizes: of captured steps with prompts; none where steps are of any size."""
    return PaddedTimes(sizes, max_num_tokens) if sizes else StepTimes()
