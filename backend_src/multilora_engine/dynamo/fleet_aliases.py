"""`FleetAliases`: the aliases of a fleet, as each worker and each front knows them; `WorkerAliases` changes them.

One worker carries out a change, and tells the others. A process that missed a change hears of it within seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import msgspec

from multilora_engine.dynamo.fleet_messages import AliasTable, Carry, LearnAliases, ReadAliases
from multilora_engine.dynamo.workers import Workers, checked
from multilora_engine.errors import AdapterNotFound, AliasConflict, AliasNotKnown, RequestError
from multilora_engine.lora.aliases import resolved, task_id_of_alias
from multilora_engine.lora.names import TaskId, scoped_task_id, task_id_of
from multilora_engine.process.operations import AliasReport, RemoveAlias, SetAlias
from multilora_engine.process.server import report_output
from multilora_engine.request import GenerationRequest, TokenOutput
from multilora_wire.adapter_info import Alias

_INTERVAL_S = 2.0

_MAX_REMOVED = 4096
"""Removed names that are remembered."""

logger = logging.getLogger(__name__)


class FleetAliases:
    """Of each name the change with the largest version. A name that was removed has no members."""

    def __init__(self) -> None:
        self._latest: dict[TaskId, Alias] = {}

    @property
    def news(self) -> list[Alias]:
        """All aliases, and the names that were removed."""
        return list(self._latest.values())

    def get(self, task_id: TaskId) -> Alias | None:
        """The alias that an adapter's task id would mean; None if it means no alias."""
        alias = self._latest.get(task_id)
        return alias if alias is not None and alias.members else None

    def next_version(self, task_id: TaskId) -> int:
        """The version of the next change of a name."""
        known = self._latest.get(task_id)
        return max(time.time_ns(), 0 if known is None else known.version + 1)

    def latest(self, alias: Alias) -> Alias:
        """The latest change of an alias's name: `alias`, or one that is known already."""
        return max(alias, self._latest.get(task_id_of_alias(alias), alias), key=_rank)

    def learn(self, alias: Alias) -> bool:
        """Remember a change unless a later one is known. Returns whether it was news."""
        task_id = task_id_of_alias(alias)
        if self._latest.get(task_id) == self.latest(alias):
            return False
        self._latest[task_id] = alias
        removed = [each for each in self._latest.values() if not each.members]
        if len(removed) > _MAX_REMOVED:
            del self._latest[task_id_of_alias(min(removed, key=_rank))]
        return True

    def alias_of(self, request: GenerationRequest) -> Alias | None:
        """The alias by which a request asks; None if it asks by an adapter or by none."""
        return None if request.task_id is None else self.get(request.task_id)

    def resolve(
        self, request: GenerationRequest, call_id: str, digest_of: Callable[[TaskId], str]
    ) -> GenerationRequest:
        """As `Aliases.resolve`. A request stays as it is if it demands a digest that no member is known to have."""
        if (alias := self.alias_of(request)) is None:
            return request
        if (demanded := request.lora_expected_digest) and demanded not in map(digest_of, _members(alias)):
            return request
        return resolved(alias, request, call_id, digest_of)

    async def read(self, workers: Workers, worker_id: int) -> list[Alias]:
        """Learn what a worker knows; returns what was news. Raises RequestError."""
        answer = checked(await workers.ask(worker_id, ReadAliases()))
        return [alias for alias in answer.aliases if self.learn(alias)] if isinstance(answer, AliasTable) else []

    async def follow(self, workers: Workers) -> None:
        """Learn what some worker knows, again and again until cancelled."""
        while True:
            await self.read_any(workers)
            await asyncio.sleep(_INTERVAL_S)

    async def read_any(self, workers: Workers) -> list[Alias]:
        """`read` from a worker by chance; nothing if that fails."""
        try:
            return await self.read(workers, workers.by_chance()[0]) if workers.ids else []
        except Exception as error:
            # A worker's errors, and those of Dynamo's discovery, which have no types.
            logger.warning("the aliases of another worker are not known: %s", error)
            return []


def _members(alias: Alias) -> list[TaskId]:
    return [scoped_task_id(alias.tenant, task_id_of(member.name)) for member in alias.members]


def _rank(alias: Alias) -> tuple[int, bytes]:
    """Two changes at the same time have an order, too, and it is the same everywhere."""
    return alias.version, msgspec.json.encode(alias)


class AliasOperator(Protocol):
    """The part of `EngineOperator` that is needed."""

    async def carry(self, message: Carry) -> TokenOutput: ...
    async def digests(self, names: Collection[str], tenant: str) -> dict[TaskId, str]: ...
    async def list_aliases(self) -> list[Alias]: ...


class KnownUploads(Protocol):
    """The part of `FleetUploads` that is needed."""

    def digest(self, task_id: TaskId) -> str: ...


class WorkerAliases:
    """Keeps the aliases of a worker's engine, which stores them, at those of the fleet."""

    def __init__(self, table: FleetAliases, uploads: KnownUploads, workers: Workers, operator: AliasOperator) -> None:
        self.table = table
        self._uploads = uploads
        self._workers = workers
        self._operator = operator
        self._not_in_engine: dict[TaskId, Alias] = {}

    async def resolve(self, request: GenerationRequest, call_id: str) -> GenerationRequest:
        """As `Aliases.resolve`: versions that the fleet knows count, then those of the engine. Raises RequestError."""
        request = self.table.resolve(request, call_id, self._uploads.digest)
        if (alias := self.table.alias_of(request)) is None:
            if request.task_id in self._not_in_engine:  # The alias is removed, and the engine would still resolve it.
                raise AdapterNotFound(request.task_id).under_name(request.lora_name)
            return request
        in_engine = await self._operator.digests([member.name for member in alias.members], alias.tenant)
        return resolved(
            alias, request, call_id, lambda task_id: self._uploads.digest(task_id) or in_engine.get(task_id, "")
        )

    async def change(self, message: Carry, operation: SetAlias | RemoveAlias) -> TokenOutput:
        """Carry out a front's operation, and tell all workers. Raises RequestError, and nothing has changed."""
        task_id = scoped_task_id(operation.tenant, task_id_of(operation.name))
        version, known = self.table.next_version(task_id), self.table.get(task_id)
        if isinstance(operation, SetAlias):
            if known is None and self._uploads.digest(task_id):
                raise AliasConflict(f"there is an adapter {operation.name!r}, and a name has one meaning")
            stamped = msgspec.structs.replace(operation, version=version)
            output = await self._operator.carry(msgspec.structs.replace(message, operation=stamped))
            changed = msgspec.json.decode(output.text, type=AliasReport).alias
        else:
            if known is None:
                raise AliasNotKnown(operation.name)
            output = report_output("", AliasReport(known))
            changed = Alias(operation.name, (), operation.tenant, version)
            await self._store(changed)
        self._not_in_engine.pop(task_id, None)
        self.table.learn(changed)
        await self._workers.ask_all(LearnAliases([changed]))
        return output

    async def learn(self, aliases: Iterable[Alias]) -> None:
        """Take in another worker's changes."""
        for alias in aliases:
            if self.table.learn(alias):
                await self._give_engine(alias)

    async def hear(self) -> None:
        """Learn what some other worker knows."""
        for alias in await self.table.read_any(self._workers):
            await self._give_engine(alias)

    async def follow(self) -> None:
        """Learn what the engine has stored, and changes that this worker has missed, again and again until cancelled.

        Until then the engine itself resolves the aliases that it has stored.
        """
        while not await self._read_stored():
            await asyncio.sleep(_INTERVAL_S)
        while True:
            await self.hear()
            for alias in list(self._not_in_engine.values()):
                await self._give_engine(alias)
            await asyncio.sleep(_INTERVAL_S)

    async def _read_stored(self) -> bool:
        """Whether the engine has told its aliases. It gets those that the fleet has changed since."""
        try:
            stored = await self._operator.list_aliases()
        except RequestError as error:
            logger.warning("the engine does not tell its aliases: %s", error)
            return False
        for alias in stored:
            self.table.learn(alias)
            if (latest := self.table.latest(alias)) != alias:
                await self._give_engine(latest)
        return True

    async def _give_engine(self, alias: Alias) -> None:
        """An engine that is starting, or that refuses, is asked again: requests are resolved before they reach it."""
        task_id = task_id_of_alias(alias)
        try:
            await self._store(alias)
        except RequestError as error:
            logger.warning("the engine does not take the alias %s: %s", alias.name, error)
            self._not_in_engine[task_id] = alias
        else:
            self._not_in_engine.pop(task_id, None)

    async def _store(self, alias: Alias) -> None:
        """Have the engine store a change. Raises RequestError."""
        if alias.members:
            await self._operator.carry(Carry(SetAlias(alias.name, alias.members, alias.tenant, alias.version)))
            return
        try:
            await self._operator.carry(Carry(RemoveAlias(alias.name, alias.tenant)))
        except RequestError as error:
            if error.code != AliasNotKnown.code:
                raise
