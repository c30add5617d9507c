"""A fleet in one event loop: workers without engines, and the parts of Dynamo's runtime that carry their messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from typing import Any

import msgspec

from multilora_engine.dynamo.adapters import FleetAdapters
from multilora_engine.dynamo.answers import END
from multilora_engine.dynamo.cards import AdapterCard
from multilora_engine.dynamo.catalogue import FleetCatalogue
from multilora_engine.dynamo.fleet_aliases import FleetAliases, WorkerAliases
from multilora_engine.dynamo.fleet_calls import FleetCalls
from multilora_engine.dynamo.fleet_messages import (
    Carry,
    Described,
    EndRequests,
    Found,
    PagesPiece,
    ReadPages,
    Upload,
    read_worker_request,
    worker_chunk,
)
from multilora_engine.dynamo.fleet_uploads import FleetUploads
from multilora_engine.dynamo.workers import Workers
from multilora_engine.errors import AdapterNotFound, AliasNotKept, AliasNotKnown, PathNotCovered, RelayedError
from multilora_engine.lora.aliases import resolved
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.names import TaskId, scoped_task_id, task_id_of
from multilora_engine.process.operations import (
    AdapterList,
    AdapterReport,
    AliasReport,
    ListAdapters,
    LoadAdapter,
    RemoveAlias,
    SetAlias,
    UnloadAdapter,
)
from multilora_engine.request import GenerationRequest, TokenOutput
from multilora_wire.adapter_info import AdapterInfo, Alias
from multilora_wire.adapter_use import use_digest
from support.fake_engine import HOLD, INFO

LAYOUT = INFO.adapter_layout
NAMES = {module.module_id: module.name for module in LAYOUT.sites.modules}
BASE = "tiny"


class FakeContext:
    """The handle of a call."""

    def __init__(self) -> None:
        self.is_stopped = False

    def stop_generating(self) -> None:
        self.is_stopped = True


class FakeWorker:
    """Answers a prompt with its own number and the prompt's tokens, if its engine has the adapter.

    in_engine: digests by task id. uses: those that are not empty, by task id. request_ids: that it has begun to answer.
    at_path: what its sources have. lacks: paths in its sources where nothing is. log: what happened at it, in order.
    fails_to_publish: discovery is gone. dies_after: it is lost when it has sent so many chunks. lies: how the pages
    that it sends are wrong: `others`, `more`, `none` at all, or it `hangs` instead. is_cut_off: no message reaches or
    leaves it. stored: the aliases that its engine had at its start. alias_operations: that its engine was given.
    stores_aliases: whether it can. engine_aliases: that its engine has.
    """

    def __init__(self, fleet: FakeFleet, worker_id: int, max_bytes: int, replaces: bool, max_known: int) -> None:
        self.worker_id = worker_id
        self.in_engine: dict[TaskId, str] = {}
        self.uses: dict[TaskId, str] = {}
        self.request_ids: list[str] = []
        self.at_path: dict[str, PackedAdapter] = {}
        self.lacks: set[str] = set()
        self.named: dict[str, str] = {}
        self.in_sources: list[str] = []
        self.cards: dict[str, AdapterCard] = {}
        self.log: list[str] = []
        self.fails_to_publish = False
        self.ended: list[str] = []
        self.held: list[FakeContext] = []
        self.dies_after: int | None = None
        self.lies = ""
        self.is_cut_off = False
        self.others = workers = Workers(FakeClient(fleet, self), FakeContext, worker_id)
        self.uploads = FleetUploads(self, workers, self, LAYOUT, max_bytes, replaces, max_known)
        self.adapters = FleetAdapters(self, self, BASE, NAMES)
        self.catalogue = FleetCatalogue(self.uploads, self.adapters, workers, self, self, LAYOUT)
        description = Described(INFO, BASE, 16)
        self.aliases = WorkerAliases(FleetAliases(), self.uploads, workers, self)
        self.stored: list[Alias] = []
        self.alias_operations: list[SetAlias | RemoveAlias] = []
        self.stores_aliases = True
        self.engine_aliases: dict[TaskId, Alias] = {}
        parts = (self.uploads, self.adapters, self.catalogue, self.aliases)
        self.calls = FleetCalls(self, self, *parts, description)  # type: ignore[arg-type]

    async def read(self, lora_task_id: int, name: str, source: str, path: str) -> PackedAdapter:
        if path in self.lacks:
            raise AdapterNotFound(lora_task_id, f"nor at {path!r}")
        if path not in self.at_path:
            raise PathNotCovered(path, ["directory"])
        self.log.append(f"read {path}")
        return self.at_path[path]

    async def list_adapters(self) -> list[AdapterInfo]:
        here = [_named_info(name, digest) for name, digest in self.named.items()]
        unread = [name for name in self.in_sources if name not in self.named and task_id_of(name) not in self.in_engine]
        return here + [_named_info(name, "") for name in unread]

    async def digests(self, names: Collection[str], tenant: str) -> dict[TaskId, str]:
        task_ids = [scoped_task_id(tenant, task_id_of(name)) for name in names]
        return {task_id: self.in_engine[task_id] for task_id in task_ids if task_id in self.in_engine}

    async def list_aliases(self) -> list[Alias]:
        return self.stored

    async def load(self, name: str) -> AdapterInfo:
        if name not in self.in_sources:
            raise RelayedError("NOT_FOUND", f"no {name} here")
        self.log.append(f"load {name}")
        self.named[name] = self.in_engine[task_id_of(name)] = f"source of {name}"
        return _named_info(name, self.named[name])

    async def unload(self, lora_task_id: int, tenant: str = "") -> AdapterInfo:
        digest = self.in_engine.pop(scoped_task_id(tenant, lora_task_id), None)
        if digest is None:
            raise RelayedError("NOT_FOUND", f"no {lora_task_id} here")
        self.log.append(f"unload {digest}")
        return _info(lora_task_id, self.worker_id)

    async def publish(self, card: AdapterCard) -> None:
        if self.fails_to_publish:
            raise RuntimeError("discovery is gone")
        self.log.append(f"card {card.name}")
        assert card.name not in self.cards, "Dynamo lets nobody change a card"
        self.cards[card.name] = card

    async def withdraw(self, name: str) -> None:
        self.log.append(f"no card {name}")
        del self.cards[name]

    async def put(self, upload: Upload, pages: bytearray) -> None:
        if (
            not self.uploads.replaces
            and self.in_engine.get(upload.task_id, upload.header.digest) != upload.header.digest
        ):
            raise RelayedError("ALREADY_EXISTS", "the engine refuses other weights")
        self.log.append(f"put {upload.header.digest}")
        self.in_engine[upload.task_id] = upload.header.digest
        self.uses[upload.task_id] = upload.header.traits.use

    async def generate(self, asked: GenerationRequest, *_: str) -> AsyncGenerator[TokenOutput | None, None]:
        if asked.task_id is not None and (alias := self.engine_aliases.get(asked.task_id)) is not None:
            asked = resolved(alias, asked, "", lambda _: "")
        task_id = asked.task_id
        if task_id is not None and self.uploads.is_behind(task_id):
            await self.uploads.bring(task_id)
        if task_id is not None and task_id not in self.in_engine and not await self.uploads.bring(task_id, True):
            raise RelayedError(AdapterNotFound.code, str(AdapterNotFound(task_id)))
        assert asked.request_id not in self.request_ids, "it may be in use"
        self.request_ids.append(asked.request_id)
        digest = "" if task_id is None else self.in_engine[task_id]
        use = "" if task_id is None else self.uses.get(task_id, "")
        if asked.chat_use not in (None, use_digest(use)):
            yield TokenOutput(asked.request_id, [], "", lora_digest=digest, asked_use=use)
            await asyncio.Event().wait()
        yield TokenOutput(asked.request_id, [self.worker_id], "", lora_digest=digest)
        if asked.prompt_token_ids[0] == HOLD:
            await asyncio.Event().wait()
        yield TokenOutput(asked.request_id, asked.prompt_token_ids, "", finish_reason="length", lora_digest=digest)

    async def carry(self, message: Carry) -> TokenOutput:
        match message.operation:
            case ListAdapters():
                adapters = [_info(task_id, self.worker_id) for task_id in self.in_engine]
                aliases = [alias for alias in self.aliases.table.news if alias.members]
                report: Any = AdapterList(adapters, aliases)
            case UnloadAdapter(lora_task_id=int(number), tenant=tenant):
                if present := self.in_engine.get(scoped_task_id(tenant, number)):
                    message.operation.expectation.check(number, "", present, present)
                report = AdapterReport(await self.unload(number, tenant))
            case LoadAdapter(lora_task_id=int(number), tenant=tenant):
                if scoped_task_id(tenant, number) not in self.in_engine:
                    raise RelayedError("NOT_FOUND", f"no {number} here")
                report = AdapterReport(_info(number, self.worker_id))
            case SetAlias(name, members, tenant, version) as operation:
                self.alias_operations.append(operation)
                if not self.stores_aliases:
                    raise AliasNotKept(name, "the disk is full")
                alias = Alias(name, members, tenant, version)
                self.engine_aliases[scoped_task_id(tenant, task_id_of(name))] = alias
                report = AliasReport(alias)
            case RemoveAlias(name, tenant) as operation:
                self.alias_operations.append(operation)
                if not self.stores_aliases:
                    raise AliasNotKept(name, "the disk is full")
                if (gone := self.engine_aliases.pop(scoped_task_id(tenant, task_id_of(name)), None)) is None:
                    raise AliasNotKnown(name)
                report = AliasReport(gone)
            case _:
                raise RelayedError("INVALID_ARG", "not that one")
        return TokenOutput("", [], msgspec.json.encode(report).decode(), finish_reason="stop")

    async def stop(self, message: EndRequests) -> None:
        self.ended.append(message.client_request_id)


class FakeFleet:
    """Workers by their numbers.

    at_router: the workers that the router knows, in the order in which it picks them. counted: the requests that it
    takes to be running.
    """

    def __init__(self, num_workers: int, max_bytes: int = 1 << 22, replaces: bool = True, max_known: int = 100) -> None:
        self._options = max_bytes, replaces, max_known
        self.workers: dict[int, FakeWorker] = {}
        for number in range(1, num_workers + 1):
            self.start(number)
        self.at_router = list(self.workers)
        self.num_picked = 0
        self.constraints: list[Any] = []
        self.begun: list[str] = []
        self.freed: list[str] = []
        self.counted: set[str | None] = set()

    def start(self, worker_id: int) -> FakeWorker:
        """A worker that knows nothing yet, perhaps in the place of another one."""
        self.workers[worker_id] = FakeWorker(self, worker_id, *self._options)
        return self.workers[worker_id]

    def kill(self, worker_id: int) -> None:
        """The worker is gone, which the router does not know yet."""
        del self.workers[worker_id]

    def __getitem__(self, worker_id: int) -> FakeWorker:
        return self.workers[worker_id]

    async def best_worker(
        self, token_ids: list[int], *, request_id: str | None = None, routing_constraints: Any = None, **_: Any
    ) -> tuple[int, int, int]:
        self.counted.add(request_id)
        self.constraints.append(routing_constraints)
        if not self.at_router:
            raise RuntimeError("no instances")
        self.num_picked += 1
        return self.at_router[(self.num_picked - 1) % len(self.at_router)], 0, 0

    async def mark_prefill_complete(self, request_id: str) -> None:
        self.begun.append(request_id)

    async def free(self, request_id: str) -> None:
        self.freed.append(request_id)
        self.counted.discard(request_id)


class FakeClient:
    """Carries messages as JSON, as Dynamo does. own: the worker that calls, None for a front."""

    def __init__(self, fleet: FakeFleet, own: FakeWorker | None = None) -> None:
        self._fleet = fleet
        self._own = own

    def instance_ids(self) -> list[int]:
        return list(self._fleet.workers)

    async def direct(self, request: Any, instance_id: int, annotated: bool, context: Any) -> AsyncIterator[Any]:
        if instance_id not in self._fleet.workers:
            raise ConnectionError(f"no instance {instance_id}")
        worker = self._fleet.workers[instance_id]
        if worker.is_cut_off or (self._own is not None and self._own.is_cut_off):
            raise ConnectionError(f"no way to {instance_id}")
        worker.held.append(context)
        return self._chunks(worker, json.loads(json.dumps(request)))

    async def _chunks(self, worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        message = read_worker_request(request)
        assert message is not None
        num_sent = 0
        async with aclosing(worker.calls.answer(message, "call")) as answers:
            async for answer in answers:
                if worker.dies_after == num_sent:
                    raise ConnectionResetError("the worker has died")
                num_sent += 1
                chunk = worker_chunk(answer)
                if worker.lies and isinstance(message, ReadPages) and isinstance(answer, PagesPiece):
                    size = len(answer.piece) * (1 + (worker.lies == "more"))
                    if worker.lies == "hangs":
                        await asyncio.Event().wait()
                    lie = Found(None) if worker.lies == "none" else PagesPiece(bytes(size))
                    chunk = worker_chunk(lie)
                yield json.loads(json.dumps(chunk))
        yield END


def _info(task_id: TaskId, worker_id: int) -> AdapterInfo:
    location: Any = "DEVICE" if worker_id == 2 else "HOST"
    number = int(str(task_id))
    return AdapterInfo(number, "", "d", "READY_FOR_USE", location, 1, (4,), 0, False, 0.0, worker_id)


def _named_info(name: str, digest: str) -> AdapterInfo:
    ranks, modules = ((4, 8), (0, 4)) if digest else ((), ())
    status: Any = "READY_FOR_USE" if digest else "NOT_DOWNLOADED"
    location: Any = "DEVICE" if digest else "REMOTE"
    number = task_id_of(name)
    return AdapterInfo(number, name, digest, status, location, 1, ranks, 0, False, 0.0, 0, module_ids=modules)
