"""A `Pace` of steps whose times are known: 20 ms, and 0.5 ms for each token."""

from __future__ import annotations

from multilora_engine.engine.pace import Pace, StepTimes, StepWork

FIXED_S = 20e-3
TOKEN_S = 0.5e-3


class KnownTimes(StepTimes):
    """Knows how long steps take without having measured any."""

    def __init__(self) -> None:
        super().__init__()
        self.token_s = TOKEN_S

    @property
    def is_known(self) -> bool:
        return True

    def own_s(self, num_tokens: int) -> float:
        return FIXED_S + TOKEN_S * num_tokens

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns nothing."""


def known_pace(target_s: float | None) -> Pace:
    """For a target, see `Pace`."""
    pace = Pace(target_s)
    pace.times = KnownTimes()
    return pace


def seconds_of(work: StepWork) -> float:
    """How long a step takes."""
    return FIXED_S + TOKEN_S * sum(work)
