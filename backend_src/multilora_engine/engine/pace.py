"""`Pace`: limits the work of a step, so that running answers do not wait long for their next tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from multilora_engine.engine.engine_stats import PaceStats
from multilora_engine.engine.step_cost import StepCost, StepWork, num_keys
from multilora_engine.sequences.sequence import Sequence

_TARGET_MULTIPLE = 2.5
"""Without a target in seconds, a step may take so many times as long as the running answers' own tokens."""

_SHARED_TARGET_MULTIPLE = 2.0
"""The same while several clients have work, so that a client's tokens wait less for another's prompts. With
less, prompts would get less than half of a step."""

_BURST_TARGET_MULTIPLE = 2.0
"""The same of the time that the answers of a whole burst will take, while some of its prompts are not computed."""

_PROMPT_SHARE = 1 / 3
"""Prompts get this part of a step's time under every target: a prompt that would take a second alone is computed within
three."""

_MAX_UNKNOWN_ROWS = 16
"""A step computes at most so many tokens of a prompt whose logits are wanted, until one such step was measured."""


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
        if self._cost is None:
            return budget
        if _has_rows(sequence) and not self._cost.knows_rows:
            budget = min(budget, _MAX_UNKNOWN_ROWS)
        num_tokens = self._num_tokens(max(0.0, self._seconds), sequence)
        return int(min(budget, max(num_tokens, self._is_untouched)))

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """The step computes so many tokens of a sequence's prompt."""
        if self._cost is None:
            return
        self._last_cost_s, _ = self._costs(sequence)
        num_rows = num_tokens if _has_rows(sequence) else 0
        keys = num_keys(sequence.num_computed_tokens, num_tokens)
        self._seconds -= self._cost.seconds_added(
            StepWork(num_prompt_tokens=num_tokens, num_prompt_rows=num_rows, num_prompt_keys=keys)
        )
        self._is_untouched = False

    def _num_tokens(self, seconds: float, sequence: Sequence) -> float:
        """How many tokens take so long: n first_s + n (n - 1) / 2 key_s = seconds."""
        first_s, key_s = self._costs(sequence)
        linear_s = first_s - key_s / 2
        divisor = linear_s + math.sqrt(linear_s**2 + 2 * key_s * seconds)
        return 2 * seconds // divisor if divisor else math.inf

    def _costs(self, sequence: Sequence) -> tuple[float, float]:
        """Seconds of a sequence's next token, and how much longer each one takes than the one before."""
        assert self._cost is not None
        has_rows, context = _has_rows(sequence), sequence.num_computed_tokens
        work = StepWork(num_prompt_tokens=1, num_prompt_rows=has_rows, num_prompt_keys=context + 1)
        return self._cost.seconds_added(work), self._cost.seconds_added(StepWork(num_prompt_keys=1))


@dataclass(frozen=True)
class Decodes:
    """The running answers that get a token in a step. within: the answers of clients within their shares."""

    sequences: list[Sequence]
    within: list[Sequence]


class Pace:
    """Keeps the gaps between the tokens of running answers near a target, by the measured cost of steps.

    The target is a time, or a multiple of the time that the running answers' own tokens take: a smaller one while
    several clients have work. It limits the tokens of prompts. The prompts of a burst to an idle server count as
    answers as soon as the first of them is one: else a few answers, whose own tokens take little time, would hold up
    all other prompts of the burst.

    Where several clients have running answers, and some hold more than their shares by weight, the answers of these
    take turns, so that those of all others need not wait for all of them. The target is then a multiple of the time
    that the clients within their shares take.
    """

    def __init__(self, target_s: float | None) -> None:
        """target_s: None is the multiple; 0 limits nothing."""
        self.cost = StepCost()
        self._target_s = target_s
        self._num_turns = 0
        self._last_turn = 0
        self._prompt_time = PromptTime()
        self._last_target_s = 0.0
        self._interruption_s = 0.0
        self._num_limited_steps = 0

    @property
    def stats(self) -> PaceStats:
        return PaceStats(self._last_target_s, self._num_limited_steps, self._num_turns)

    def interrupt(self, seconds: float) -> None:
        """The time between the last step and the next one, for which running answers have already waited."""
        self._interruption_s = seconds

    def observe(self, seconds: float, work: StepWork | None) -> None:
        """A step took so long, from its scheduling until its outputs had left. work: None teaches nothing."""
        self._num_limited_steps += self._prompt_time.is_used_up
        self._prompt_time = PromptTime()
        if work is not None:
            self.cost.observe(work, seconds)

    def choose(self, decoding: list[Sequence]) -> Decodes:
        """The answers that get a token in the next step. decoding: all that could."""
        over = _clients_over_their_share(decoding) if self._is_limited(decoding) else set()
        if not over:
            # Only prompts ask for times then: a step of nothing but answers computes none.
            return Decodes(decoding, decoding)
        within = [s for s in decoding if s.request.sender.account not in over]
        within_s = self._seconds(within)
        target_s = _SHARED_TARGET_MULTIPLE * within_s if self._target_s is None else self._target_s
        spare_s = max(0.0, target_s - within_s - self._interruption_s)
        return Decodes(self._turns(decoding, over, spare_s / 2), within)

    def prompt_time(
        self, decodes: Decodes, is_shared: bool = False, burst: Iterable[Sequence] = (), has_late: bool = False
    ) -> PromptTime:
        """The time for prompts in a step with these answers.

        is_shared: whether several clients have sequences that run or wait. burst: prompts of the only client that came
        before its running answers began. has_late: whether any prompt has waited too long; then the step may take as
        long as without a target in seconds.
        """
        if not self._is_limited(decodes.sequences):
            return PromptTime()
        patient_target_s = self._patient_target_s(decodes.within, is_shared, burst)
        target_s = patient_target_s if self._target_s is None else self._target_s
        if has_late:
            target_s = max(target_s, patient_target_s)
        decode_s = self._seconds(decodes.sequences)
        share_s = decode_s * _PROMPT_SHARE / (1 - _PROMPT_SHARE)
        first_s = self.cost.seconds_added(StepWork(has_prompts=1))
        self._last_target_s = target_s
        left_s = target_s - decode_s - first_s - self._interruption_s
        self._prompt_time = PromptTime(max(left_s, share_s), self.cost)
        return self._prompt_time

    def _is_limited(self, answers: list[Sequence]) -> bool:
        """Whether the time of a step with these answers is limited."""
        return self._target_s != 0 and bool(answers) and self.cost.is_known

    def _patient_target_s(self, within: list[Sequence], is_shared: bool, burst: Iterable[Sequence]) -> float:
        """The target that a step has without one in seconds."""
        within_s = self._seconds(within)
        if is_shared:
            return _SHARED_TARGET_MULTIPLE * within_s
        return max(_TARGET_MULTIPLE * within_s, _BURST_TARGET_MULTIPLE * self._seconds([*within, *burst]))

    def _turns(self, decoding: list[Sequence], over: set[str], spare_s: float) -> list[Sequence]:
        """All answers but some of the clients `over` their shares: of these, the longest waiting get a token, as
        many as there is time for, one at least."""
        self._num_turns += 1
        others = [sequence for sequence in decoding if sequence.request.sender.account in over]
        others.sort(key=lambda sequence: sequence.last_turn)
        waiting = set(others[1:])
        self._have_turn(others[0])
        for sequence in others[1:]:
            spare_s -= self.cost.seconds_added(work_of_decodes([sequence]))
            if spare_s < 0:
                break
            self._have_turn(sequence)
            waiting.remove(sequence)
        return [sequence for sequence in decoding if sequence not in waiting]

    def _have_turn(self, sequence: Sequence) -> None:
        # Those of one step are numbered, too: else the first of them would always be first again.
        self._last_turn += 1
        sequence.last_turn = self._last_turn

    def _seconds(self, sequences: list[Sequence]) -> float:
        return self.cost.seconds(work_of_decodes(sequences))


def _has_rows(sequence: Sequence) -> bool:
    return sequence.request.sampling.reads_whole_prompt


def work_of_decodes(sequences: list[Sequence]) -> StepWork:
    """One token of each sequence, or of each of its beams."""
    num_beams = sum(len(sequence.siblings) + 1 for sequence in sequences if sequence.search is not None)
    num_others = sum(sequence.search is None for sequence in sequences)
    keys = sum(beam.num_computed_tokens + 1 for sequence in sequences for beam in sequence.beams)
    return StepWork(num_decodes=num_others + num_beams, num_beams=num_beams, num_decode_keys=keys)


def _clients_over_their_share(decoding: list[Sequence]) -> set[str]:
    """The clients that have more of the running sequences than their shares, by weight, of all clients that run."""
    first = decoding[0].request.sender.account
    if all(sequence.request.sender.account == first for sequence in decoding):
        return set()
    weights = {sequence.request.sender.account: sequence.request.sender.weight for sequence in decoding}
    rows: Counter[str] = Counter()
    for sequence in decoding:
        rows[sequence.request.sender.account] += len(sequence.siblings) + 1
    num_rows, total = rows.total(), sum(weights.values())
    return {name for name, number in rows.items() if number / num_rows > weights[name] / total}
