"""A `Pace` of steps whose cost is known: 20 ms, 1 ms for each decode, 0.5 ms for each token and row of a prompt."""

from __future__ import annotations

from multilora_engine.engine.pace import Pace
from multilora_engine.engine.step_cost import StepCost, StepWork

FIXED_S = 20e-3
DECODE_S = 1e-3
PROMPT_TOKEN_S = 0.5e-3


class KnownCost(StepCost):
    """Knows the cost of steps without having measured any."""

    @property
    def is_known(self) -> bool:
        return True

    @property
    def knows_rows(self) -> bool:
        return True

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns nothing."""

    def seconds(self, work: StepWork) -> float:
        return FIXED_S + self.seconds_added(work)

    def seconds_added(self, work: StepWork) -> float:
        return DECODE_S * work.num_decodes + PROMPT_TOKEN_S * (work.num_prompt_tokens + work.num_prompt_rows)


def known_pace(target_s: float | None) -> Pace:
    """For a target, see `Pace`."""
    pace = Pace(target_s)
    pace.cost = KnownCost()
    return pace
