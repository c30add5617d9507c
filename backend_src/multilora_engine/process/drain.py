"""How an engine ends without losing a request: SIGTERM tells it to take no more, a file tells that the last has ended.

Triton's own order is the other way round: on SIGTERM it stops listening and refuses the later steps of ensembles, whose
requests in flight then never end. So its engine is drained before a server is stopped.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

_LOOK_INTERVAL_S = 0.05


def drained_file(socket_path: Path) -> Path:
    """A file beside the engine's socket, which is there once a drained engine has nothing in flight any more."""
    return socket_path.with_name("drained")


class DrainOrder:
    """The engine's side. fd: readable once it is told to take no more requests."""

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
