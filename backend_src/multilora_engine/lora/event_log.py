"""`EventLog`: the latest events of the adapters, numbered."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

Event = TypeVar("Event")


@dataclass(frozen=True)
class NumberedEvents(Generic[Event]):
    """A piece of the log. num_missed: events before `events` that were asked for and are forgotten already.

    last: number of the latest event; asking for the events after it continues where this piece ends.
    """

    events: list[Event]
    last: int
    num_missed: int


class EventLog(Generic[Event]):
    """Remembers the last `capacity` events. The first event ever has number 1."""

    def __init__(self, capacity: int) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._last = 0

    def append(self, event: Event) -> None:
        self._events.append(event)
        self._last += 1

    def since(self, number: int) -> NumberedEvents[Event]:
        """The events after `number`, oldest first; a number from before a restart of the engine may be any."""
        num_forgotten = self._last - len(self._events)
        first = min(max(number, num_forgotten), self._last)
        events = list(islice(self._events, first - num_forgotten, None))
        return NumberedEvents(events, self._last, num_missed=max(0, num_forgotten - max(number, 0)))
