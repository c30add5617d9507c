"""`HostWork`: the time that a request may take of the thread that runs the steps of all requests."""

from __future__ import annotations

from multilora_engine.errors import TooMuchHostWork
from multilora_engine.request import SamplingParams
from multilora_engine.sequences.sequence import Sequence

_MAX_DEBT = 5
"""A request may be behind by so many times the time that all requests of a step may take together."""

_MAX_CHARGE = 2
"""The most that one step charges, likewise."""


class HostWork:
    """The time of the engine's own thread, between the computations of two steps, that single requests cost: for words,
    guides and beams. A request without any is neither timed nor charged.

    The requests of a step share `seconds_per_step` equally. A request's time beyond its shares is its debt; further
    steps pay it off. One step alone ends no request: the interpreter may have collected garbage in it. Time is the
    thread's own, so a machine that is busy with other work ends no request either.
    """

    def __init__(self, seconds_per_step: float) -> None:
        """seconds_per_step: 0 sets no limit."""
        self._seconds_per_step = seconds_per_step

    def charge(self, sequence: Sequence, seconds: float, num_sharing: int) -> None:
        """A sequence took so many seconds in a step in which `num_sharing` are charged.

        Raises TooMuchHostWork when its debt is more than any request may have.
        """
        budget_s = self._seconds_per_step
        charge_s = min(seconds, _MAX_CHARGE * budget_s)
        sequence.host_debt_s = max(0.0, sequence.host_debt_s + charge_s - budget_s / num_sharing)
        if sequence.host_debt_s > _MAX_DEBT * budget_s:
            raise TooMuchHostWork(sequence.host_debt_s, self._seconds_per_step, num_sharing)


def has_host_work(sampling: SamplingParams) -> bool:
    """Whether tokens of a request may cost more than those of any other one."""
    has_words = bool(sampling.stop_words or sampling.stop_token_sequences)
    return has_words or sampling.guide is not None or sampling.beam_width > 1
