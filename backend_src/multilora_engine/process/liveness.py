"""The life of a process as others see it: `Heartbeat` and `Pulse` tell a hang, `wait_for_end` the end; drained ends.

The heartbeat is a counter in memory that both processes map, without a clock. The supervisor looks at the counter a few
times per timeout and counts the looks. Jumps of the clock mean nothing, and a pause of both processes (a frozen
container, a suspended machine) costs one look. An engine that loads has not begun to count, so a load may take any
time. An engine that computes counts between layers, so a step may take any time, too.

A drained engine ends without losing a request: SIGTERM tells it to take no more, a file tells that the last has ended.
Triton's own order is the other way round: on SIGTERM it stops listening and refuses the later steps of ensembles, whose
requests in flight then never end. So the engine is drained before its server is stopped.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import time
from pathlib import Path

LOOKS_PER_TIMEOUT = 10
"""The supervisor looks this many times per timeout; an idle engine counts once between two looks."""


class Heartbeat:
    """The counter, in the file `fd`. One process writes the counter, another one reads it.

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


def wait_for_end(pid: int, timeout_s: float | None = None) -> bool:
    """Sleep until a process has ended; False if it has not after `timeout_s`.

    `Popen.wait` with a timeout asks again and again instead, under a lock that an interrupt (Ctrl-C) can leave locked.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


_LOOK_INTERVAL_S = 0.05


def drained_file(socket_path: Path) -> Path:
    """A file beside the engine's socket, which is there once a drained engine has nothing in flight any more."""
    return socket_path.with_name("drained")


class DrainOrder:
    """The side of the engine. fd: readable once the engine is told to take no more requests."""

    def __init__(self, socket_path: Path) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._file = drained_file(socket_path)

    def give(self, *_: object) -> None:
        """Tell it. May be called in a signal handler."""
        os.eventfd_write(self.fd, 1)

    def fulfil(self) -> None:
        """Say that nothing is in flight any more."""
        self._file.touch()

    def close(self) -> None:
        os.close(self.fd)


def drain_engine(pid: int, socket_path: Path, timeout_s: float) -> bool:
    """Make the engine process `pid` take no more requests, and wait until it has ended its present ones.

    False if it has not by then, or is gone: it died, or was still loading.
    """
    file = drained_file(socket_path)
    file.unlink(missing_ok=True)
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while not file.exists():
            if select.select([fd], [], [], _LOOK_INTERVAL_S)[0] or time.monotonic() > deadline:
                return False
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
