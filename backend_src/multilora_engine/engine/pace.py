"""`Pace`: limits the work of a step, so that running answers do not wait long for their next tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from multilora_engine.engine.engine_stats import PaceStats
from multilora_engine.engine.sequence import Sequence
from multilora_engine.engine.step_cost import StepCost, StepWork

_TARGET_MULTIPLE = 3.0
"""Without a target in seconds, a step may take so many times as long as the running answers' own tokens."""

_PROMPT_SHARE = 1 / 3
"""Prompts get this part of a step's time, whatever the target is: a prompt that would take a second alone is computed
within three."""

_MIN_PROMPT_TOKENS = 16
"""Prompts get so many tokens of a step; fewer would take nearly as long."""


_STEPS_PER_SAMPLE = 8
"""One in so many steps without prompts is measured: they are all alike."""


class PromptTime:
    """The time that a step has for tokens of prompts."""

    def __init__(self, seconds: float = math.inf, cost: StepCost | None = None) -> None:
        """cost: of a token; None for a step that nobody waits for, which has as much time as it wants."""
        self._seconds = seconds
        self._cost = cost
        self._is_untouched = True
        self._last_cost_s = 0.0

    @property
    def is_used_up(self) -> bool:
        """Whether there is no time for one more token like the last ones."""
        return self._seconds < self._last_cost_s

    def room_for(self, sequence: Sequence, budget: int) -> int:
        """How many of `budget` tokens a sequence may compute of its prompt: at least one if it is the first to."""
        cost_s = self._cost_of(sequence)
        if not cost_s:
            return budget
        return min(budget, max(int(self._seconds / cost_s), int(self._is_untouched)))

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """The step computes so many tokens of a sequence's prompt."""
        self._last_cost_s = self._cost_of(sequence)
        self._seconds -= num_tokens * self._last_cost_s
        self._is_untouched = False

    def _cost_of(self, sequence: Sequence) -> float:
        if self._cost is None:
            return 0.0
        has_logits = sequence.request.sampling.reads_whole_prompt
        return self._cost.seconds_added(StepWork(num_prompt_tokens=1, num_prompt_rows=int(has_logits)))


@dataclass(frozen=True)
class Decodes:
    """The running answers that get a token in a step.

    within: the answers of clients within their shares. is_limited: whether the step is to keep to a target.
    """

    sequences: list[Sequence]
    within: list[Sequence]
    is_limited: bool


class Pace:
    """Keeps the gaps between the tokens of running answers near a target, by the measured cost of steps.

    The target is a time, or a multiple of the time that the running answers' own tokens take. Tokens of prompts are
    limited by the time it leaves. Where several clients have running answers, and some hold more than their shares by
    weight, the answers of these take turns, so that those of all others need not wait for all of them: the own tokens
    that the target is a multiple of are those of the clients within their shares.
    """

    def __init__(self, target_s: float | None) -> None:
        """target_s: None is the multiple; 0 limits nothing."""
        self.cost = StepCost()
        self._target_s = target_s
        self._num_steps = 0
        self._turn = 0
        self._prompt_time = PromptTime()
        self._last_target_s = 0.0
        self._num_limited_steps = 0

    @property
    def stats(self) -> PaceStats:
        return PaceStats(self._last_target_s, self._num_limited_steps, self._turn)

    def observe(self, seconds: float, has_prompts: bool, work_of_step: Callable[[], StepWork]) -> None:
        """A step took so long, from its scheduling to its outputs. work_of_step: called if that is of interest."""
        self._num_steps += 1
        self._num_limited_steps += self._prompt_time.is_used_up
        self._prompt_time = PromptTime()
        if has_prompts or self._num_steps % _STEPS_PER_SAMPLE == 0:
            self.cost.observe(work_of_step(), seconds)

    def choose(self, decoding: list[Sequence]) -> Decodes:
        """The answers that get a token in the next step. decoding: all that could."""
        if self._target_s == 0 or not decoding or not self.cost.is_known:
            return Decodes(decoding, decoding, is_limited=False)
        over = _clients_over_their_share(decoding)
        if not over:
            return Decodes(decoding, decoding, is_limited=True)
        within = [s for s in decoding if s.request.sender.name not in over]
        spare_s = max(0.0, self._target(within) - self._seconds(within))
        return Decodes(self._turns(decoding, over, spare_s / 2), within, is_limited=True)

    def prompt_time(self, decodes: Decodes) -> PromptTime:
        """The time for prompts in a step with these answers."""
        if not decodes.is_limited:
            return PromptTime()
        target_s = self._target(decodes.within)
        decode_s = self._seconds(decodes.sequences)
        share_s = decode_s * _PROMPT_SHARE / (1 - _PROMPT_SHARE)
        few_s = self.cost.seconds_added(StepWork(num_prompt_tokens=_MIN_PROMPT_TOKENS))
        self._last_target_s = target_s
        self._prompt_time = PromptTime(max(target_s - decode_s, share_s, few_s), self.cost)
        return self._prompt_time

    def _target(self, sequences: list[Sequence]) -> float:
        return _TARGET_MULTIPLE * self._seconds(sequences) if self._target_s is None else self._target_s

    def _turns(self, decoding: list[Sequence], over: set[str], spare_s: float) -> list[Sequence]:
        """All answers but some of the clients `over` their shares: of these, the longest waiting get a token, as
        many as there is time for, one at least."""
        self._turn += 1
        others = [sequence for sequence in decoding if sequence.request.sender.name in over]
        others.sort(key=lambda sequence: sequence.last_turn)
        waiting = set(others[1:])
        others[0].last_turn = self._turn
        for sequence in others[1:]:
            spare_s -= self.cost.seconds_added(work_of_decodes([sequence]))
            if spare_s < 0:
                break
            sequence.last_turn = self._turn
            waiting.remove(sequence)
        return [sequence for sequence in decoding if sequence not in waiting]

    def _seconds(self, sequences: list[Sequence]) -> float:
        return self.cost.seconds(work_of_decodes(sequences))


def work_of_decodes(sequences: list[Sequence]) -> StepWork:
    """One token of each sequence, or of each of its beams."""
    num_beams = sum(len(sequence.siblings) + 1 for sequence in sequences if sequence.search is not None)
    num_others = sum(sequence.search is None for sequence in sequences)
    return StepWork(num_decodes=num_others + num_beams, num_beams=num_beams)


def _clients_over_their_share(decoding: list[Sequence]) -> set[str]:
    """The clients that have more of the running sequences than their shares, by weight, of all clients that run."""
    first = decoding[0].request.sender.name
    if all(sequence.request.sender.name == first for sequence in decoding):
        return set()
    weights = {sequence.request.sender.name: sequence.request.sender.weight for sequence in decoding}
    rows: Counter[str] = Counter()
    for sequence in decoding:
        rows[sequence.request.sender.name] += len(sequence.siblings) + 1
    num_rows, total = rows.total(), sum(weights.values())
    return {name for name, number in rows.items() if number / num_rows > weights[name] / total}
