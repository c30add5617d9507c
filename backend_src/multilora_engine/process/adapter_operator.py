"""`AdapterOperator`: carries out an operator's requests about the adapters of the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from multilora_engine.engine.engine_stats import WeightInfo, WeightStats
from multilora_engine.errors import (
    AdapterNotDeleted,
    AdapterNotFound,
    AdapterNotHere,
    AliasConflict,
    AliasNotKept,
    InvalidRequest,
    RequestError,
)
from multilora_engine.lora.adapter_events import AdapterEventLog
from multilora_engine.lora.adapter_sets import AdapterSets
from multilora_engine.lora.aliases import task_id_of_alias
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.names import SetMember, TaskId, checked_members, scoped_task_id, task_id_of
from multilora_engine.lora.remote import Fetch, RemoteAdapters, describe_remote
from multilora_engine.lora.sources.source import AdapterKey
from multilora_engine.lora.versions import ANY_VERSION, Expectation
from multilora_engine.process.messages import AdapterScope
from multilora_engine.process.operations import (
    AdapterList,
    AdapterReport,
    AliasReport,
    CombineAdapters,
    DescribeModel,
    EventList,
    LayoutReport,
    ListAdapters,
    LoadAdapter,
    LoadReport,
    ModelReport,
    NamedMember,
    Operation,
    PinAdapter,
    ReadEvents,
    ReadLayout,
    ReadStats,
    RemoveAlias,
    Report,
    SetAlias,
    StatsReport,
    SwitchWeights,
    UnloadAdapter,
    UnpinAdapter,
    WeightList,
)
from multilora_engine.process.telemetry import AdapterUsage
from multilora_wire.adapter_info import AdapterInfo, Alias


class PendingSwitch(Protocol):
    """The part of `multilora_engine.engine.unpacked_weights.PendingWeights` that the operator uses."""

    @property
    def is_ready(self) -> Callable[[], bool]: ...
    @property
    def finish(self) -> Callable[[], list[WeightInfo]]: ...


class ManagedWeights(Protocol):
    """The part of `multilora_engine.engine.unpacked_weights.UnpackedWeights` that the operator uses."""

    @property
    def stats(self) -> WeightStats: ...
    def describe(self, patterns: Sequence[str]) -> list[WeightInfo]: ...
    def pack(self, patterns: Sequence[str]) -> list[WeightInfo]: ...
    def unpack(self, patterns: Sequence[str]) -> PendingSwitch: ...


@dataclass(frozen=True, slots=True)
class PendingReport:
    """A report that waits for a source or for the disk.

    is_ready: whether `report` can be called now: it returns the report or raises a RequestError.
    """

    is_ready: Callable[[], bool]
    report: Callable[[], Report]


class AdapterOperator:
    """Belongs to the engine's thread. An answer tells the state at the moment of the answer."""

    def __init__(
        self,
        adapters: LoRAManager,
        remote: RemoteAdapters,
        sets: AdapterSets,
        events: AdapterEventLog,
        usage: AdapterUsage,
        clients: AdapterUsage,
        read_load: Callable[[], LoadReport],
        model: ModelReport,
        weights: ManagedWeights,
    ) -> None:
        self._weights = weights
        self._model = model
        self._read_load = read_load
        self._adapters = adapters
        self._remote = remote
        self._sets = sets
        self._events = events
        self._usage = usage
        self._clients = clients

    def execute(self, operation: Operation, scope: AdapterScope) -> Report | PendingReport:
        """Carry out an operation. The caller has checked the sender's rights.

        scope: the adapters that the sender may see. Raises AdapterNotFound, AdapterNotHere, AdapterVersionChanged,
        InvalidRequest or Unavailable, and changes nothing then.
        """
        match operation:
            case ListAdapters(names, tenant, is_for_requests=False) if names:
                return self._look_up(names, tenant, scope)
            case ListAdapters(names):
                keys = self._remote.list_sources()
                make = partial(self._look_up_everywhere, names) if names else self._list
                return PendingReport(keys.done, lambda: make(keys.result(), scope))
            case LoadAdapter():
                return self._load(operation)
            case CombineAdapters():
                return self._combine(operation)
            case SetAlias():
                alias = Alias(operation.name, operation.members, operation.tenant, operation.version)
                in_sources = self._remote.list_sources()
                return self._change_aliases(
                    alias.name, in_sources.done, lambda: self._set_alias(alias, in_sources.result())
                )
            case RemoveAlias(name, tenant):
                return self._change_aliases(name, lambda: True, lambda: self._adapters.aliases.remove(name, tenant))
            case UnloadAdapter():
                return self._unload(operation)
            case PinAdapter():
                task_id = _task_id(self._find(operation))
                return self._when_arrived(task_id, self._adapters.hold(task_id))
            case UnpinAdapter():
                return self._unpin(operation)
            case ReadEvents(since):
                piece = (self._events if scope.is_everything else self._events.of(scope.tenant)).since(since)
                return EventList(piece.events, piece.last, piece.num_missed)
            case ReadStats():
                return self._read_stats()
            case ReadLayout():
                return LayoutReport(self._adapters.device.layout)
            case DescribeModel():
                return self._model
            case SwitchWeights():
                return self._switch(operation)

    def _read_stats(self) -> StatsReport:
        tiers = replace(self._adapters.stats, remote=self._remote.stats)
        resident = self._adapters.inventory.residency(self._usage.max_adapters)
        residency = replace(resident, load_seconds=resident.load_seconds.plus(self._remote.load_seconds))
        return StatsReport(
            tiers,
            self._usage.by_label,
            self._usage.other,
            self._read_load(),
            residency,
            self._clients.by_label,
            self._clients.other,
        )

    def _switch(self, operation: SwitchWeights) -> Report | PendingReport:
        if operation.action == "unpack":
            pending = self._weights.unpack(operation.modules)
            return PendingReport(pending.is_ready, lambda: self._switched(pending.finish()))
        find = self._weights.pack if operation.action == "pack" else self._weights.describe
        return self._switched(find(operation.modules))

    def _switched(self, weights: Sequence[WeightInfo]) -> WeightList:
        return WeightList([*weights], self._weights.stats)

    def _list(self, in_sources: Iterable[AdapterKey], scope: AdapterScope) -> AdapterList:
        adapters = {_task_id(info): info for info in (*self._remote.describe(), *self._adapters.inventory.describe())}
        for key in in_sources:
            adapters.setdefault(key.lora_task_id, describe_remote(key))
        return _list_of(adapters.values(), self._adapters.aliases.describe(), scope)

    def _look_up(self, names: Iterable[str], tenant: str, scope: AdapterScope) -> AdapterList:
        return _list_of(self._in_tiers({scoped_task_id(tenant, task_id_of(name)) for name in names}), [], scope)

    def _look_up_everywhere(
        self, names: Collection[str], in_sources: Iterable[AdapterKey], scope: AdapterScope
    ) -> AdapterList:
        task_ids = {scoped_task_id(tenant, task_id_of(name)) for tenant in ("", scope.tenant) for name in names}
        coming = (*self._remote.describe(), *map(describe_remote, in_sources))
        adapters = {_task_id(info): info for info in coming if info.name in names}
        adapters |= {_task_id(info): info for info in self._in_tiers(task_ids)}
        aliases = filter(None, map(self._adapters.aliases.get, task_ids))
        return _list_of(adapters.values(), aliases, scope)

    def _in_tiers(self, task_ids: Iterable[TaskId]) -> Iterator[AdapterInfo]:
        for task_id in task_ids:
            with suppress(AdapterNotFound):
                yield self._adapters.inventory.info(task_id)

    def _change_aliases(
        self, name: str, may_begin: Callable[[], bool], begin: Callable[[], tuple[Alias, Future[None]]]
    ) -> PendingReport:
        aliases = self._adapters.aliases
        change = _AliasChange(name, lambda: may_begin() and not aliases.is_storing, begin)
        return PendingReport(change.is_ready, change.report)

    def _set_alias(self, alias: Alias, in_sources: Iterable[AdapterKey]) -> tuple[Alias, Future[None]]:
        """Raises AliasConflict for a new alias whose name an adapter has, in a tier, on its way or in a source."""
        task_id, aliases = task_id_of_alias(alias), self._adapters.aliases
        known = (*self._remote.describe(), *self._adapters.inventory.describe(), *map(describe_remote, in_sources))
        if aliases.get(task_id) is None and any(
            info.tenant == alias.tenant and (info.name == alias.name or _task_id(info) == task_id) for info in known
        ):
            raise AliasConflict(
                f"there is an adapter {alias.name!r}, and a name has one meaning: give the alias another name, or "
                "unload the adapter and take it out of its source first"
            )
        return alias, aliases.set(alias)

    def _check_no_alias(self, task_id: TaskId) -> None:
        """Raises InvalidRequest for an alias in place of an adapter."""
        if (alias := self._adapters.aliases.get(task_id)) is not None:
            members = ", ".join(member.name for member in alias.members)
            raise InvalidRequest(f"{alias.name!r} is an alias of {members}; name one of them, or remove the alias")

    def _load(self, operation: LoadAdapter) -> Report | PendingReport:
        name = operation.name or ""
        lora_task_id = task_id_of(name) if operation.lora_task_id is None else operation.lora_task_id
        key, task_id = AdapterKey(lora_task_id, name), scoped_task_id(operation.tenant, lora_task_id)
        self._adapters.aliases.check_adapter(task_id, name)
        present = self._adapters.inventory.digest(task_id)
        operation.expectation.check(lora_task_id, name, present, present)
        if operation.path:
            return self._fetch(key, operation.source, operation.path, operation.expectation)
        try:
            arrived = self._adapters.load(task_id)
        except AdapterNotFound as error:
            if operation.tenant:
                raise error.under_name(name) from None  # sources have the server's adapters only
            return self._fetch(key, operation.source)
        return self._when_arrived(task_id, arrived)

    def _combine(self, operation: CombineAdapters) -> PendingReport:
        name = operation.name or ""
        number = task_id_of(name) if operation.lora_task_id is None else operation.lora_task_id
        members = checked_members(
            SetMember(_member_id(member), member.weight, member.tenant) for member in operation.members
        )
        task_id = scoped_task_id(operation.tenant, number)
        self._adapters.aliases.check_adapter(task_id, name)
        self._adapters.aliases.check_members(members)
        expectation = operation.expectation
        if (fetch := self._sets.fetch(task_id, members, name, expectation=expectation)) is None:
            return self._when_arrived(task_id, self._adapters.load(task_id))
        return PendingReport(lambda: _has_arrived(fetch), lambda: self._fetched(fetch, expectation))

    def _when_arrived(self, task_id: TaskId, arrived: Future[None]) -> PendingReport:
        return PendingReport(arrived.done, lambda: self._arrived(task_id, arrived))

    def _arrived(self, task_id: TaskId, arrived: Future[None]) -> AdapterReport:
        if arrived.cancelled():
            raise AdapterNotFound(task_id, "it was unloaded or replaced before it was in memory")
        arrived.result(timeout=0)
        return AdapterReport(self._adapters.inventory.info(task_id))

    def _fetch(
        self, key: AdapterKey, source: str, path: str = "", expectation: Expectation = ANY_VERSION
    ) -> PendingReport:
        try:
            fetch = self._remote.fetch(key, source, path, expectation)
        except AdapterNotFound as error:
            raise error.under_name(key.name) from None
        return PendingReport(lambda: _has_arrived(fetch), lambda: self._fetched(fetch, expectation))

    def _fetched(self, fetch: Fetch, expectation: Expectation) -> AdapterReport:
        try:
            fetch.check(expectation)
        except AdapterNotFound as error:
            raise error.under_name(fetch.key.name) from None
        if fetch.arrived is not None:
            return self._arrived(fetch.task_id, fetch.arrived)
        return AdapterReport(self._adapters.inventory.info(fetch.task_id))

    def _unload(self, operation: UnloadAdapter) -> Report | PendingReport:
        info = self._find(operation)
        if (deleted := self._adapters.unload(_task_id(info))) is None:
            return AdapterReport(info)
        return PendingReport(deleted.done, partial(_unloaded, info, deleted))

    def _unpin(self, operation: UnpinAdapter) -> AdapterReport:
        self._adapters.end_hold(_task_id(self._find(operation)))
        return AdapterReport(self._find(operation))

    def _find(self, operation: UnloadAdapter | PinAdapter | UnpinAdapter) -> AdapterInfo:
        """The present version of the adapter that an operation names. Raises AdapterVersionChanged for another one."""
        info = self._named(operation)
        operation.expectation.check(info.lora_task_id, info.name, info.digest, info.digest)
        return info

    def _named(self, operation: UnloadAdapter | PinAdapter | UnpinAdapter) -> AdapterInfo:
        lora_task_id, name = operation.lora_task_id, operation.name
        if lora_task_id is None:
            assert name is not None, "an operation names its adapter"
            return self._info(scoped_task_id(operation.tenant, task_id_of(name)), f"LoRA adapter {name!r}")
        info = self._info(scoped_task_id(operation.tenant, lora_task_id), f"LoRA task {lora_task_id}")
        if name not in (None, info.name):
            raise InvalidRequest(f"LoRA task {lora_task_id} is named {info.name!r}, not {name!r}")
        return info

    def _info(self, task_id: TaskId, called: str) -> AdapterInfo:
        self._check_no_alias(task_id)
        try:
            return self._adapters.inventory.info(task_id)
        except AdapterNotFound:
            raise AdapterNotHere(called) from None


class _AliasChange:
    """A change of an alias that begins when it may, and is answered when it is stored.

    begin: the alias to report, and the end of the change; raises RequestError.
    """

    def __init__(
        self, name: str, may_begin: Callable[[], bool], begin: Callable[[], tuple[Alias, Future[None]]]
    ) -> None:
        self._name = name
        self._may_begin = may_begin
        self._begin = begin
        self._begun: tuple[Alias, Future[None]] | RequestError | None = None

    def is_ready(self) -> bool:
        if self._begun is None and self._may_begin():
            try:
                self._begun = self._begin()
            except RequestError as error:
                self._begun = error
        return isinstance(self._begun, RequestError) or (self._begun is not None and self._begun[1].done())

    def report(self) -> AliasReport:
        """Raises AliasNotKept, or the RequestError of a change that was refused."""
        assert self._begun is not None, "a report is made when it is ready"
        if isinstance(self._begun, RequestError):
            raise self._begun
        alias, stored = self._begun
        try:
            stored.result()
        except OSError as error:
            raise AliasNotKept(self._name, str(error)) from error
        return AliasReport(alias)


def _unloaded(info: AdapterInfo, deleted: Future[None]) -> AdapterReport:
    """The report on an adapter that no later start finds. Raises AdapterNotDeleted if one would."""
    try:
        deleted.result()
    except OSError as error:
        raise AdapterNotDeleted(info.lora_task_id, str(error)) from error
    return AdapterReport(info)


def _member_id(member: NamedMember) -> int:
    return task_id_of(member.name or "") if member.lora_task_id is None else member.lora_task_id


def _has_arrived(fetch: Fetch) -> bool:
    """Whether a fetch has ended, and its adapter is in its place in memory."""
    return fetch.is_done and (fetch.arrived is None or fetch.arrived.done())


def _list_of(adapters: Iterable[AdapterInfo], aliases: Iterable[Alias], scope: AdapterScope) -> AdapterList:
    """What a sender may see of these."""
    seen = adapters if scope.is_everything else _seen_by(scope, adapters)
    return AdapterList(
        sorted(seen, key=lambda info: (info.tenant, info.lora_task_id)),
        [*(aliases if scope.is_everything else _aliases_seen_by(scope, aliases))],
    )


def _seen_by(scope: AdapterScope, adapters: Iterable[AdapterInfo]) -> Iterator[AdapterInfo]:
    """The tenant's own adapters, and the server's adapters that it may use, without their places and users."""
    # Imported here: at the start it would take a fifth of a second.
    from multilora_client.keys import AdapterPatterns

    shared = AdapterPatterns(scope.shared, task_id_of)
    for info in adapters:
        if info.tenant:
            if info.tenant == scope.tenant:
                yield info
        elif shared.match(info.lora_task_id, info.name):
            yield describe_remote(AdapterKey(info.lora_task_id, info.name))


def _aliases_seen_by(scope: AdapterScope, aliases: Iterable[Alias]) -> Iterator[Alias]:
    """The tenant's own aliases, and the server's aliases that it may use, without their members."""
    from multilora_client.keys import AdapterPatterns

    shared = AdapterPatterns(scope.shared, task_id_of)
    for alias in aliases:
        if alias.tenant:
            if alias.tenant == scope.tenant:
                yield alias
        elif shared.match(task_id_of(alias.name), alias.name):
            yield Alias(alias.name, ())


def _task_id(info: AdapterInfo) -> TaskId:
    return scoped_task_id(info.tenant, info.lora_task_id)
