"""`AdapterEventLog`: the events of all adapters, and those of each tenant's on their own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from multilora_wire.adapter_event import AdapterEvent

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


_TENANT_PART = 8
"""A tenant's log remembers one event for each so many of the log of all adapters."""


class AdapterEventLog(EventLog[AdapterEvent]):
    """Each tenant's events have numbers of their own: common numbers would tell it how much others do."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._tenant_capacity = max(1, capacity // _TENANT_PART)
        self._by_tenant: dict[str, EventLog[AdapterEvent]] = {}

    def append(self, event: AdapterEvent) -> None:
        super().append(event)
        if event.tenant:
            self._by_tenant.setdefault(event.tenant, EventLog(self._tenant_capacity)).append(event)

    def of(self, tenant: str) -> EventLog[AdapterEvent]:
        """The log of a tenant."""
        return self._by_tenant.get(tenant) or EventLog(self._tenant_capacity)
