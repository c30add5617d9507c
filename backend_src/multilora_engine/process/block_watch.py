"""`BlockWatch`: hands the prefix cache's events on to the front that watches it."""

from __future__ import annotations

from multilora_engine.engine.block_events import BlockEvent, BlockEvents
from multilora_engine.process.fronts import Fronts
from multilora_engine.process.messages import BlockChanges

_MAX_WAITING = 1 << 16
"""Events that wait for a front that does not read. A front that misses one knows a wrong cache, and is told no more."""


class BlockWatch:
    """At most one front watches. Events that it cannot take yet wait for it."""

    def __init__(self, events: BlockEvents, fronts: Fronts) -> None:
        self._events = events
        self._fronts = fronts
        self._front: bytes | None = None
        self._waiting: list[BlockEvent] = []

    def begin(self, front: bytes) -> None:
        """Tell `front` from now on."""
        self._front = front
        self._events.want()
        self._events.take()
        self._waiting.clear()

    def flush(self) -> None:
        """Send the events so far."""
        self._waiting += self._events.take()
        if not self._waiting or self._front is None:
            return
        if self._front not in self._fronts or len(self._waiting) > _MAX_WAITING:
            self._front = None
            self._waiting.clear()
        elif self._fronts.send(self._front, BlockChanges(self._waiting)):
            self._waiting = []
