"""`AdapterEvents`: the events of all adapters, and those of each tenant's on their own."""

from __future__ import annotations

from multilora_engine.lora.event_log import EventLog
from multilora_wire.adapter_event import AdapterEvent

_TENANT_PART = 8
"""A tenant's log remembers one event for each so many of the log of all adapters."""


class AdapterEvents(EventLog[AdapterEvent]):
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
