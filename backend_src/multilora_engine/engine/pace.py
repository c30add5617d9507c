"""`Pace`: how much work a step may have, so that running answers do not wait long for their next tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from multilora_engine.engine.engine_stats import PaceStats
from multilora_engine.sequences.sequence import ScheduledSequence, Sequence, Source

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

_TOKENS_OF_LOGITS = 3
"""A token of a prompt whose logits are wanted counts as so many tokens."""

_STEPS_OF_ANSWERS = 16
"""One in so many steps has answers alone while prompts wait, so that the time of answers stays known."""

_UNKNOWN_TOKEN_S = 1e-3
"""The price of a token before the first measured step."""

_LEAST_TOKEN_S = 1e-9
"""Nothing beside the time of a token: a step has no room for a number of tokens without end."""

_WEIGHT = 0.3
"""The weight of the newest step in a moving average."""

_MANY_TOKENS = 32
"""A step with fewer tokens more has less weight: chance would be divided by few tokens."""

_MAX_SURPRISE = 2.0
"""A step counts as no longer than so many times the expected time: garbage may have been collected in it. A step that
is so many times shorter tells that the steps before it were the odd ones: a machine's first steps touch all memory."""


class StepWork(NamedTuple):
    """The tokens of a step. num_own: of answers. num_more: of prompts (by price), of sources, and of answers that take
    turns.
    """

    num_own: int
    num_more: int


class StepTimes:
    """How long steps take, by two moving averages: the seconds of a step that has answers alone, and the seconds that
    each token more takes.

    A token more is one of a prompt, of a source, or of an answer that takes turns. Such work of other clients may be
    dear, and must not count as the time of the answers' own tokens: all other answers would wait for it. That is why a
    step without any of it is measured now and then.
    """

    def __init__(self) -> None:
        self.token_s = _UNKNOWN_TOKEN_S
        self._own_s = 0.0
        self._num_own = 0
        self._knows_token = False

    @property
    def is_known(self) -> bool:
        """Whether any step of answers alone was measured."""
        return self._num_own > 0

    def own_s(self, num_tokens: int) -> float:
        """How long a step with so many answers' tokens alone is expected to take.

        A token more or less than in the average changes it by `token_s`, but never by more than in proportion.
        """
        if not self.is_known:
            return 0.0
        by_token_s = self._own_s + (num_tokens - self._num_own) * self.token_s
        in_proportion_s = self._own_s * num_tokens / self._num_own
        return sorted((self._own_s, by_token_s, in_proportion_s))[1]

    def num_more(self, num_own: int, seconds: float) -> float:
        """How many tokens more a step with so many answers' tokens may have, if they may take so long."""
        return seconds / self.token_s

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        own_s = self.own_s(work.num_own)
        expected_s = own_s + work.num_more * self.token_s
        is_known = self._knows_token if work.num_more else self.is_known
        if is_known:
            seconds = min(seconds, _MAX_SURPRISE * expected_s)
        if not work.num_more:
            is_first = not is_known or _MAX_SURPRISE * seconds < expected_s
            self._own_s = seconds if is_first else own_s + _WEIGHT * (seconds - own_s)
            self._num_own = work.num_own
        else:
            # A few tokens tell much if they are expected to take much of the step.
            part = max(min(1.0, work.num_more / _MANY_TOKENS), work.num_more * self.token_s / expected_s)
            token_s = max(0.0, seconds - own_s) / work.num_more
            self.token_s += (_WEIGHT * part if is_known else 1.0) * (token_s - self.token_s)
            self.token_s = max(self.token_s, _LEAST_TOKEN_S)
            self._knows_token = True


class Step:
    """A step in the making: the scheduled sequences, how many tokens of the budget are left, and how much time.

    answers: that get a token in it. turns: the answers that have a turn, in the order of their turns. source_budget:
    tokens of sources that may still be encoded.
    """

    def __init__(
        self,
        budget: int,
        answers: list[Sequence],
        turns: Iterable[Sequence] = (),
        num_tokens: float = math.inf,
        least: int = 1,
    ) -> None:
        """budget: tokens. num_tokens: of prompts. A first prompt may compute `least` whatever that is."""
        self.budget = budget
        self.source_budget = 0
        self.answers = answers
        self.turns = list(turns)
        self._num_tokens = num_tokens
        self._least = least
        self._scheduled: dict[Sequence, ScheduledSequence] = {}
        self._sources: set[Source] = set()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._scheduled

    @property
    def sequences(self) -> list[ScheduledSequence]:
        return list(self._scheduled.values())

    @property
    def has_time(self) -> bool:
        """Whether there is time for one more token of a prompt."""
        return self._num_tokens >= 1 or self._least > 0

    def room_for(self, sequence: Sequence, num_source_tokens: int = 0) -> int:
        """How many tokens of its prompt a sequence may compute, none if its source cannot be encoded before.

        A source cannot be cut: the first one is encoded whatever time it takes. num_source_tokens: 0 if the source is
        computed or known, or if there is none.
        """
        left = self._num_tokens - num_source_tokens
        if num_source_tokens > self.source_budget or (left < 1 and not self._least):
            return 0
        return int(min(self.budget, max(self._least, left / _price(sequence))))

    def take_time(self, sequence: Sequence, num_tokens: int) -> None:
        """So many tokens of a sequence's prompt are going to be added, and its source is going to be encoded."""
        num_source_tokens = sequence.num_missing_source_tokens
        self._num_tokens = max(0.0, self._num_tokens - num_source_tokens - num_tokens * _price(sequence))
        self._least = 0

    def add(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        """Compute so many tokens. The first beam that is added of a search has the source encoded."""
        start = sequence.num_computed_tokens
        is_sampled = start + num_tokens == sequence.num_tokens
        source = sequence.source
        encodes_source = source is not None and not source.is_computed and source not in self._sources
        num_starts = sequence.block_table.num_starts
        added = ScheduledSequence(sequence, start, num_tokens, is_sampled, encodes_source, num_starts)
        self._scheduled[sequence] = added
        self.budget -= num_tokens
        if encodes_source and source is not None:
            self._sources.add(source)
            self.source_budget -= added.num_source_tokens
        return added

    def remove(self, sequence: Sequence) -> None:
        for beam in sequence.beams:
            scheduled = self._scheduled.pop(beam, None)
            if scheduled is not None:
                self.budget += scheduled.num_tokens
                self.source_budget += scheduled.num_source_tokens
                if sequence.source is not None:
                    self._sources.discard(sequence.source)


class Pace:
    """Keeps the gaps between the tokens of running answers near a target, by the measured times of steps.

    The target is a time, or a multiple of the time that the running answers' own tokens take: a smaller one while
    several clients have work. It limits the tokens of prompts. The prompts of a burst to an idle server count as
    answers as soon as the first of them is one: else a few answers, whose own tokens take little time, would hold up
    all other prompts of the burst (bench_engine, 16 requests at once: 11 % fewer tokens a second).

    Where several clients have running answers, and some hold more than their shares by weight, the answers of these
    take turns, so that the answers of all others need not wait for all of them. The target is then a multiple of the
    time that the clients within their shares take.

    A source takes its tokens' time. It is encoded whole, so that a step with a long one takes longer than the target.

    A step lasts from its scheduling until its outputs have left: for all of that time the next one has to wait. Where
    steps are launched before the last one is read, a step begins when the outputs of the one before have left.
    """

    def __init__(self, target_s: float | None, times: StepTimes | None = None) -> None:
        """target_s: None is the multiple; 0 limits nothing. times: by default those of steps of any size."""
        self.times = times or StepTimes()
        self._target_s = target_s
        self._over: AbstractSet[Sequence] = frozenset()
        self._num_turns = 0
        self._last_target_s = 0.0
        self._num_limited_steps = 0
        self._num_unmeasured = 0
        self._interruption_s = 0.0
        self._end_s = 0.0
        self._read: tuple[float, StepWork] | None = None

    @property
    def stats(self) -> PaceStats:
        return PaceStats(self._last_target_s, self._num_limited_steps, self._num_turns)

    def begin(self) -> float:
        """A step is going to be scheduled. The time, by the monotonic clock."""
        self._tell()
        now_s = time.monotonic()
        self.interrupt(max(0.0, now_s - self._end_s))
        return now_s

    def interrupt(self, seconds: float) -> None:
        """The time between the last step and the next one, for which running answers have already waited."""
        self._interruption_s = seconds

    def plan(
        self,
        budget: int,
        decoding: list[Sequence],
        over: AbstractSet[Sequence] = frozenset(),
        is_shared: bool = False,
        num_burst: int = 0,
    ) -> Step:
        """The next step, empty. budget: its tokens. decoding: the answers that could get a token. over: the answers of
        clients that have more answers than their shares. is_shared: whether several clients have sequences that run or
        wait. num_burst: prompts of the only client that came before its answers began.
        """
        self._over = frozenset()
        if self._target_s == 0 or not decoding:
            return Step(budget, decoding)
        self._over = over
        own = [sequence for sequence in decoding if sequence not in over] if over else decoding
        if self._num_unmeasured + 1 >= _STEPS_OF_ANSWERS or not self.times.is_known:
            return Step(budget, own, num_tokens=0, least=0)
        own_s = self.times.own_s(num_rows(own))
        self._last_target_s = self._target(own, own_s, is_shared, num_burst)
        spare_s = max(0.0, self._last_target_s - own_s - self._interruption_s)
        turns = self._turns(decoding, spare_s / 2) if over else []
        turns_s = num_rows(turns) * self.times.token_s
        share_s = (own_s + turns_s) * _PROMPT_SHARE / (1 - _PROMPT_SHARE)
        has_turn = {*own, *turns}
        answers = [sequence for sequence in decoding if sequence in has_turn] if over else decoding
        num_answers = num_rows(own) + num_rows(turns)
        return Step(budget, answers, turns, self.times.num_more(num_answers, max(spare_s - turns_s, share_s)))

    def finish(self, step: Step) -> float:
        """A planned step has been scheduled. The seconds of it that do not grow with its tokens, for each token."""
        num_tokens = [one.num_tokens + one.num_source_tokens for one in step.sequences]
        num_answers = num_tokens.count(1)
        self._num_limited_steps += not step.has_time and num_answers < len(num_tokens)
        rest_s = self.times.own_s(num_answers) - num_answers * self.times.token_s
        return max(0.0, rest_s) / max(1, sum(num_tokens))

    def launch(self, step: list[ScheduledSequence]) -> StepWork:
        """The planned step is launched. Its work, for `note_read`."""
        prompts = [one for one in step if one.num_tokens > 1]
        num_answers = len(step) - len(prompts)
        num_turns = sum(one.num_tokens == 1 and one.sequence in self._over for one in step) if self._over else 0
        num_prompt_tokens = sum(one.num_tokens * _price(one.sequence) for one in prompts)
        num_source_tokens = sum(one.num_source_tokens for one in step)
        work = StepWork(num_answers - num_turns, num_turns + num_prompt_tokens + num_source_tokens)
        self._num_unmeasured = self._num_unmeasured + 1 if work.num_own and work.num_more else 0
        self._over = frozenset()
        return work

    def note_read(self, started_s: float, work: StepWork) -> None:
        """The outputs of a step are there. started_s: by `begin`."""
        self._tell()
        self._read = (max(started_s, self._end_s), work)
        self._end_s = time.monotonic()

    def note_sent(self) -> None:
        """The outputs of the last step have left. A caller without anything to send need not call this."""
        if self._read is not None:
            self._end_s = time.monotonic()

    def _tell(self) -> None:
        if self._read is not None:
            started_s, work = self._read
            self.times.observe(work, self._end_s - started_s)
            self._read = None

    def _target(self, own: list[Sequence], own_s: float, is_shared: bool, num_burst: int) -> float:
        if self._target_s is not None:
            return self._target_s
        if is_shared:
            return _SHARED_TARGET_MULTIPLE * own_s
        burst_s = self.times.own_s(num_rows(own) + num_burst)
        return max(_TARGET_MULTIPLE * own_s, _BURST_TARGET_MULTIPLE * burst_s)

    def _turns(self, decoding: list[Sequence], spare_s: float) -> list[Sequence]:
        """The answers that have a turn, of the clients over their shares: the longest-waiting answers, as many as there
        is time for, one at least.
        """
        self._num_turns += 1
        others = [sequence for sequence in decoding if sequence in self._over]
        others.sort(key=lambda sequence: sequence.last_turn)
        left = spare_s / self.times.token_s
        turns: list[Sequence] = []
        for sequence in others:
            left -= num_rows([sequence])
            if left < 0 and turns:
                break
            turns.append(sequence)
        return turns


def _price(sequence: Sequence) -> int:
    return _TOKENS_OF_LOGITS if sequence.request.sampling.reads_whole_prompt else 1


def num_rows(sequences: Iterable[Sequence]) -> int:
    """One token of each sequence, or of each of its beams."""
    return sum(len(sequence.siblings) + 1 for sequence in sequences)
