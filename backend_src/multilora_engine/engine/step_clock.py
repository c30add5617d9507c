"""`StepClock`: tells `Pace` how long each step took, and how long the engine did something else before the next one."""

from __future__ import annotations

import time

from multilora_engine.engine.pace import Pace
from multilora_engine.engine.step import work_of
from multilora_engine.engine.step_cost import StepWork
from multilora_engine.sequences.scheduled_sequence import ScheduledSequence

_STEPS_PER_SAMPLE = 8
"""One in so many steps without prompts is measured: they are all alike."""


class StepClock:
    """A step lasts from its scheduling until its outputs have left: for all of that time the next one has to wait.

    Where steps are launched before the last one is read, a step begins when the outputs of the one before have left.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._num_steps = 0
        self._end_s = 0.0
        self._begun: tuple[float, StepWork | None] | None = None

    def begin(self) -> float:
        """A step is going to be scheduled. The time, by the monotonic clock."""
        self._tell()
        now_s = time.monotonic()
        self._pace.interrupt(max(0.0, now_s - self._end_s))
        return now_s

    def work_to_measure(self, step: list[ScheduledSequence]) -> StepWork | None:
        """The work of a step, if it is to be measured. Call this before the step is computed: afterwards, the prompts'
        logits and log-probs that it computes no longer count as wanted."""
        self._num_steps += 1
        # Steps end with the tokens of prompts.
        is_measured = not step[-1].is_decode or self._num_steps % _STEPS_PER_SAMPLE == 0
        return work_of(step) if is_measured else None

    def note_read(self, started_s: float, work: StepWork | None) -> None:
        """The outputs of a step are there. started_s: by `begin`."""
        self._tell()
        self._begun = (max(started_s, self._end_s), work)
        self._end_s = time.monotonic()

    def note_sent(self) -> None:
        """The outputs of the last step have left. A caller without anything to send need not call this."""
        if self._begun is not None:
            self._end_s = time.monotonic()

    def _tell(self) -> None:
        if self._begun is not None:
            started_s, work = self._begun
            self._pace.observe(self._end_s - started_s, work)
            self._begun = None
