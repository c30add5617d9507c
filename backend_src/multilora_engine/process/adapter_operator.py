"""`AdapterOperator`: carries out what an operator asks about the adapters of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from multilora_engine.errors import AdapterNotFound, AdapterNotKnown, InvalidRequest
from multilora_engine.lora.event_log import EventLog
from multilora_engine.lora.layout import AdapterLayout
from multilora_engine.lora.life_cycle import AdapterEvent, AdapterInfo, LoRAStats
from multilora_engine.lora.names import task_id_of
from multilora_engine.lora.remote import Fetch, RemoteAdapters, describe_remote
from multilora_engine.lora.residency import Residency
from multilora_engine.lora.sources.source import AdapterKey
from multilora_engine.lora.usage import AdapterUsage
from multilora_engine.process.operations import (
    DescribeModel,
    ListAdapters,
    LoadAdapter,
    Operation,
    PinAdapter,
    ReadEvents,
    ReadLayout,
    ReadStats,
    UnloadAdapter,
    UnpinAdapter,
)
from multilora_engine.process.reports import (
    AdapterList,
    AdapterReport,
    EventList,
    LayoutReport,
    LoadReport,
    ModelReport,
    Report,
    StatsReport,
)


class ManagedAdapters(Protocol):
    """What the operator needs of `multilora_engine.lora.manager.LoRAManager`."""

    @property
    def stats(self) -> LoRAStats: ...
    def residency(self, max_adapters: int) -> Residency: ...
    @property
    def layout(self) -> AdapterLayout: ...
    def describe(self) -> list[AdapterInfo]: ...
    def info(self, lora_task_id: int) -> AdapterInfo: ...
    def load(self, lora_task_id: int) -> None: ...
    def unload(self, lora_task_id: int) -> None: ...
    def pin_adapter(self, lora_task_id: int) -> None: ...
    def unpin_adapter(self, lora_task_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class PendingReport:
    """A report that waits for a source. is_ready: whether `report` can give it, or raise a RequestError, by now."""

    is_ready: Callable[[], bool]
    report: Callable[[], Report]


class AdapterOperator:
    """Lives on the engine's thread. What it answers with is of the moment it answers."""

    def __init__(
        self,
        adapters: ManagedAdapters,
        remote: RemoteAdapters,
        events: EventLog[AdapterEvent],
        usage: AdapterUsage,
        read_load: Callable[[], LoadReport],
        model: ModelReport,
    ) -> None:
        self._model = model
        self._read_load = read_load
        self._adapters = adapters
        self._remote = remote
        self._events = events
        self._usage = usage

    def execute(self, operation: Operation) -> Report | PendingReport:
        """Raises AdapterNotFound, AdapterNotKnown, AdapterCacheFull or InvalidRequest; nothing has changed then."""
        match operation:
            case ListAdapters():
                keys = self._remote.list_sources()
                return PendingReport(keys.done, lambda: self._list(keys.result()))
            case LoadAdapter():
                return self._load(operation)
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
                return self._read_stats()
            case ReadLayout():
                return LayoutReport(self._adapters.layout)
            case DescribeModel():
                return self._model

    def _read_stats(self) -> StatsReport:
        tiers = replace(self._adapters.stats, remote=self._remote.stats)
        resident = self._adapters.residency(self._usage.max_adapters)
        residency = replace(resident, load_seconds=resident.load_seconds.plus(self._remote.load_seconds))
        return StatsReport(tiers, self._usage.by_task_id, self._usage.other, self._read_load(), residency)

    def _list(self, in_sources: Iterable[AdapterKey]) -> AdapterList:
        adapters = {info.lora_task_id: info for info in (*self._remote.describe(), *self._adapters.describe())}
        for key in in_sources:
            adapters.setdefault(key.lora_task_id, describe_remote(key))
        return AdapterList([adapters[lora_task_id] for lora_task_id in sorted(adapters)])

    def _load(self, operation: LoadAdapter) -> Report | PendingReport:
        name = operation.name or ""
        lora_task_id = task_id_of(name) if operation.lora_task_id is None else operation.lora_task_id
        key = AdapterKey(lora_task_id, name)
        try:
            self._adapters.load(lora_task_id)
        except AdapterNotFound:
            return self._fetch(key, operation.source)
        return AdapterReport(self._adapters.info(lora_task_id))

    def _fetch(self, key: AdapterKey, source: str) -> PendingReport:
        try:
            fetch = self._remote.fetch(key, source)
        except AdapterNotFound as error:
            raise error.under_name(key.name) from None
        return PendingReport(lambda: fetch.is_done, lambda: self._fetched(fetch))

    def _fetched(self, fetch: Fetch) -> AdapterReport:
        if isinstance(fetch.error, AdapterNotFound):
            raise fetch.error.under_name(fetch.key.name)
        if fetch.error is not None:
            raise fetch.error
        return AdapterReport(self._adapters.info(fetch.key.lora_task_id))

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
