"""The life of a process as other processes see it. `Heartbeat` and `Pulse` notice a hang, `wait_for_end` the end, and
`drain_engine` makes an engine end without losing a request.

The heartbeat is a counter in memory that both processes map, without a clock. The supervisor looks at the counter a few
times per timeout and counts the looks. So jumps of the clock do not matter, and a pause of both processes (a frozen
container, a suspended machine) costs one look. An engine that loads has not begun to count, so a load may take any
time. An engine that computes counts between layers, so a step may take any time, too.

SIGTERM tells an engine to take no more requests, and a file tells that the last one has ended. On SIGTERM, Triton
itself stops listening and refuses the later steps of ensembles, so that their requests in flight never end. So the
engine is drained before its server is stopped.
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

_DRAINED_LOOK_INTERVAL_S = 0.05
"""Between two looks for the file of a drained engine."""


class Heartbeat:
    """The counter, in the file `fd`. One process writes it, another one reads it.

    interval_s: how often an idle engine counts; None for never.
    """

    def __init__(self, fd: int, interval_s: float | None) -> None:
        self.interval_s = interval_s
        # One aligned word: a reader never sees half of a count.
        self._counter = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")

    @property
    def count(self) -> int:
        """The number of beats so far; 0 while the engine loads."""
        return self._counter[0]

    def beat(self) -> None:
        self._counter[0] += 1


def heartbeat_file() -> int:
    """A new file descriptor for a `Heartbeat`, which the engine process inherits."""
    fd = os.memfd_create("multilora-heartbeat", os.MFD_CLOEXEC)
    os.truncate(fd, mmap.PAGESIZE)
    return fd


class Pulse:
    """Tells whether a counter has stood still for the timeout. It needs a look every `timeout / LOOKS_PER_TIMEOUT`."""

    def __init__(self) -> None:
        self._last = 0
        self._num_unchanged = 0

    def has_stopped(self, count: int) -> bool:
        """Take one look. Never true before the first beat."""
        self._num_unchanged = self._num_unchanged + 1 if count == self._last else 0
        self._last = count
        return count > 0 and self._num_unchanged >= LOOKS_PER_TIMEOUT


def wait_for_end(pid: int, timeout_s: float | None = None) -> bool:
    """Sleep until a process has ended. Returns False if it has not ended after `timeout_s`.

    `Popen.wait` with a timeout would ask again and again, under a lock that an interrupt (Ctrl-C) can leave locked.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


def drained_file(socket_path: Path) -> Path:
    """A file beside the engine's socket. It appears when a drained engine has nothing in flight any more."""
    return socket_path.with_name("drained")


class DrainOrder:
    """The engine's side of draining. fd: readable once the engine is told to take no more requests."""

    def __init__(self, socket_path: Path) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._file = drained_file(socket_path)

    def give(self, *_: object) -> None:
        """Tell the engine to take no more requests. A signal handler may call this."""
        os.eventfd_write(self.fd, 1)

    def fulfil(self) -> None:
        """Tell the other side that nothing is in flight any more."""
        self._file.touch()

    def close(self) -> None:
        os.close(self.fd)


def drain_engine(pid: int, socket_path: Path, timeout_s: float) -> bool:
    """Make the engine process `pid` take no more requests, and wait until its present requests have ended.

    Returns False if they have not ended in time, or if the process is gone: it died, or was still loading.
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
            if select.select([fd], [], [], _DRAINED_LOOK_INTERVAL_S)[0] or time.monotonic() > deadline:
                return False
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
