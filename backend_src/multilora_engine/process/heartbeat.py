"""`Heartbeat`: how an engine process shows that it is alive; `Pulse`: how its supervisor sees that it no longer is.

A counter in memory that both processes map, and no clock. The supervisor looks at it a few times per timeout and counts
the looks: jumps of the clock mean nothing, and neither does a pause of both processes (a frozen container, a suspended
machine), which costs one look. An engine that loads has not begun to count, so a load may take as long as it takes; one
that computes counts between layers, so a step may too.
"""

from __future__ import annotations

import mmap
import os

LOOKS_PER_TIMEOUT = 10
"""How finely the supervisor measures; an idle engine counts once between two looks."""


class Heartbeat:
    """The counter, in the file `fd`. One process writes it, another reads it.

    interval_s: an engine that has nothing to do counts this often, and with None never.
    """

    def __init__(self, fd: int, interval_s: float | None) -> None:
        self.interval_s = interval_s
        # One aligned word: a reader never sees half of a count.
        self._counter = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")

    @property
    def count(self) -> int:
        """Beats so far; 0 while the engine loads."""
        return self._counter[0]

    def beat(self) -> None:
        self._counter[0] += 1


def heartbeat_file() -> int:
    """A new file descriptor for a `Heartbeat`, which the engine process inherits."""
    fd = os.memfd_create("multilora-heartbeat", os.MFD_CLOEXEC)
    os.truncate(fd, mmap.PAGESIZE)
    return fd


class Pulse:
    """Whether a counter that is looked at every `timeout / LOOKS_PER_TIMEOUT` has stood still for the timeout."""

    def __init__(self) -> None:
        self._last = 0
        self._num_unchanged = 0

    def has_stopped(self, count: int) -> bool:
        """Take one look. Never true before the first beat."""
        self._num_unchanged = self._num_unchanged + 1 if count == self._last else 0
        self._last = count
        return count > 0 and self._num_unchanged >= LOOKS_PER_TIMEOUT
