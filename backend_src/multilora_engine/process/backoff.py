"""`Backoff`: when a process that keeps dying is started again."""

from __future__ import annotations

_LONGEST_S = 30.0
_HEALTHY_S = 60.0


class Backoff:
    """0, 1, 2, 4, ... 30 seconds: the first death in a row is no reason to wait.

    num_deaths: in a row. A process that lived for a minute did not die of its start; a new row begins with it.
    """

    def __init__(self) -> None:
        self.num_deaths = 0

    def next_delay_s(self, lived_s: float) -> float:
        """Note the death of a process that lived for `lived_s`; the seconds to wait before the next one is started."""
        self.num_deaths = 1 if lived_s > _HEALTHY_S else self.num_deaths + 1
        return 0.0 if self.num_deaths == 1 else min(_LONGEST_S, 2.0 ** (self.num_deaths - 2))
