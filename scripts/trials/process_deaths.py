"""Finds the process that died first of several, and took the others with it."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping
from typing import Self

import psutil


class Deaths:
    """Watches processes until the context ends, in a thread of its own, which sees their order under any load."""

    def __init__(self, processes: Mapping[str, psutil.Process]) -> None:
        self._processes = processes
        self._first = frozenset[str]()
        self._is_known = threading.Event()

    def __enter__(self) -> Self:
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._names = dict[int, str]()
        for name, process in self._processes.items():
            try:
                self._names[os.pidfd_open(process.pid)] = name
            except ProcessLookupError:
                self._note(self._first | {name})
        self._thread = threading.Thread(target=self._watch, name="deaths", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for fd in (self._end, *self._names):
            os.close(fd)

    def wait(self, timeout_s: float) -> frozenset[str]:
        """The process that died first, once one has; empty if none has by then. Several: no order was seen."""
        self._is_known.wait(timeout_s)
        return self._first

    def _watch(self) -> None:
        ready, _, _ = select.select([self._end, *self._names], [], [])
        if not self._first and self._end not in ready:
            self._note(frozenset(self._names[fd] for fd in ready))

    def _note(self, names: frozenset[str]) -> None:
        self._first = names
        self._is_known.set()
