"""`AdapterOperator`: carries out what an operator asks about the adapters of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from multilora_engine.errors import AdapterNotFound, AdapterNotKnown, InvalidRequest
from multilora_engine.lora.event_log import EventLog
from multilora_engine.lora.life_cycle import AdapterEvent, AdapterInfo, LoRAStats
from multilora_engine.lora.names import task_id_of
from multilora_engine.lora.usage import AdapterUsage, Usage
from multilora_engine.process.operations import (
    ListAdapters,
    Operation,
    PinAdapter,
    ReadEvents,
    ReadStats,
    UnloadAdapter,
    UnpinAdapter,
)


class ManagedAdapters(Protocol):
    """What the operator needs of `multilora_engine.lora.manager.LoRAManager`."""

    @property
    def stats(self) -> LoRAStats: ...
    def describe(self) -> list[AdapterInfo]: ...
    def info(self, lora_task_id: int) -> AdapterInfo: ...
    def unload(self, lora_task_id: int) -> None: ...
    def pin_adapter(self, lora_task_id: int) -> None: ...
    def unpin_adapter(self, lora_task_id: int) -> None: ...


class AdapterList(msgspec.Struct, frozen=True):
    """The answer to `list`, by task id."""

    adapters: list[AdapterInfo]


class AdapterReport(msgspec.Struct, frozen=True):
    """The answer to `pin` and `unpin`; and to `unload`, as the adapter was: its pins are the requests that go on."""

    adapter: AdapterInfo


class EventList(msgspec.Struct, frozen=True):
    """The answer to `events`; see `NumberedEvents`."""

    events: list[AdapterEvent]
    last: int
    num_missed: int


class StatsReport(msgspec.Struct, frozen=True):
    """The answer to `stats`. usage: of the adapters most asked for, by task id; other_usage: of all the others."""

    tiers: LoRAStats
    usage: dict[int, Usage]
    other_usage: Usage


Report = AdapterList | AdapterReport | EventList | StatsReport


class AdapterOperator:
    """Lives on the engine's thread. What it answers with is of the moment it was asked."""

    def __init__(self, adapters: ManagedAdapters, events: EventLog[AdapterEvent], usage: AdapterUsage) -> None:
        self._adapters = adapters
        self._events = events
        self._usage = usage

    def execute(self, operation: Operation) -> Report:
        """Raises AdapterNotFound, AdapterNotKnown or InvalidRequest; nothing has changed then."""
        match operation:
            case ListAdapters():
                return AdapterList(sorted(self._adapters.describe(), key=lambda info: info.lora_task_id))
            case UnloadAdapter():
                return self._unload(operation)
            case PinAdapter():
                return self._change(operation, self._adapters.pin_adapter)
            case UnpinAdapter():
                return self._change(operation, self._adapters.unpin_adapter)
            case ReadEvents(since):
                piece = self._events.since(since)
                return EventList(piece.events, piece.last, piece.num_missed)
            case ReadStats():
                return StatsReport(self._adapters.stats, self._usage.by_task_id, self._usage.other)

    def _unload(self, operation: UnloadAdapter) -> AdapterReport:
        info = self._find(operation)
        self._adapters.unload(info.lora_task_id)
        return AdapterReport(info)

    def _change(self, operation: PinAdapter | UnpinAdapter, change: Callable[[int], None]) -> AdapterReport:
        change(self._find(operation).lora_task_id)
        return AdapterReport(self._find(operation))

    def _find(self, operation: UnloadAdapter | PinAdapter | UnpinAdapter) -> AdapterInfo:
        """The current version of the adapter that is meant."""
        lora_task_id, name = operation.lora_task_id, operation.name
        if lora_task_id is None:
            assert name is not None, "an operation names its adapter"
            return self._find_by_name(name)
        info = self._adapters.info(lora_task_id)
        if name not in (None, info.name):
            raise InvalidRequest(f"LoRA task {lora_task_id} is named {info.name!r}, not {name!r}")
        return info

    def _find_by_name(self, name: str) -> AdapterInfo:
        try:
            return self._adapters.info(task_id_of(name))
        except AdapterNotFound:
            raise AdapterNotKnown(name) from None
