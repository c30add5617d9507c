"""A fleet in one event loop: workers without engines, and the parts of Dynamo's runtime that carry their messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from multilora_engine.dynamo.answers import END
from multilora_engine.dynamo.card import AdapterCard
from multilora_engine.dynamo.fleet_calls import FleetCalls
from multilora_engine.dynamo.fleet_messages import (
    Carry,
    Described,
    EndRequests,
    ReadPages,
    Upload,
    read_worker_request,
    worker_chunk,
)
from multilora_engine.dynamo.fleet_uploads import FleetUploads
from multilora_engine.dynamo.workers import Workers
from multilora_engine.errors import AdapterNotFound, RelayedError
from multilora_engine.lora.names import TaskId, scoped_task_id
from multilora_engine.process.operations import ListAdapters, UnloadAdapter
from multilora_engine.process.reports import AdapterList, AdapterReport
from multilora_engine.request import GenerationRequest, TokenOutput
from multilora_wire.adapter_info import AdapterInfo
from support.fake_engine import HOLD, INFO

LAYOUT = INFO.adapter_layout
NAMES = {module.module_id: module.name for module in LAYOUT.sites.modules}


class FakeContext:
    """The handle of a call."""

    def __init__(self) -> None:
        self.is_stopped = False

    def stop_generating(self) -> None:
        self.is_stopped = True


class FakeWorker:
    """Answers a prompt with its own number and the prompt's tokens, if its engine has the adapter.

    in_engine: digests by task id. dies_after: it is lost when it has sent so many chunks. lies: its pages are others.
    """

    def __init__(self, fleet: FakeFleet, worker_id: int, max_bytes: int, replaces: bool) -> None:
        self.worker_id = worker_id
        self.in_engine: dict[TaskId, str] = {}
        self.cards: dict[str, AdapterCard] = {}
        self.ended: list[str] = []
        self.held: list[FakeContext] = []
        self.dies_after: int | None = None
        self.lies = False
        workers = Workers(FakeClient(fleet), FakeContext, worker_id)
        self.uploads = FleetUploads(self, workers, LAYOUT, max_bytes, replaces)
        description = Described(INFO, "tiny", 16)
        self.calls = FleetCalls(self, self, self.uploads, self, description, NAMES)  # type: ignore[arg-type]

    async def put(self, upload: Upload, pages: bytearray) -> None:
        self.in_engine[upload.task_id] = upload.header.digest

    async def generate(self, asked: GenerationRequest, *_: str) -> AsyncGenerator[TokenOutput | None, None]:
        task_id = asked.task_id
        if task_id is not None and task_id not in self.in_engine and not await self.uploads.bring(task_id, True):
            raise RelayedError(AdapterNotFound.code, str(AdapterNotFound(task_id)))
        digest = "" if task_id is None else self.in_engine[task_id]
        yield TokenOutput(asked.request_id, [self.worker_id], "", lora_digest=digest)
        if asked.prompt_token_ids[0] == HOLD:
            await asyncio.Event().wait()
        yield TokenOutput(asked.request_id, asked.prompt_token_ids, "", finish_reason="length", lora_digest=digest)

    async def carry(self, message: Carry) -> TokenOutput:
        match message.operation:
            case ListAdapters():
                adapters = [_info(task_id, self.worker_id) for task_id in self.in_engine]
                report: Any = AdapterList(adapters)
            case UnloadAdapter(lora_task_id=int(number), tenant=tenant):
                if self.in_engine.pop(scoped_task_id(tenant, number), None) is None:
                    raise RelayedError("NOT_FOUND", f"no {number} here")
                report = AdapterReport(_info(number, self.worker_id))
            case _:
                raise RelayedError("INVALID_ARG", "not that one")
        return TokenOutput("", [], msgspec.json.encode(report).decode(), finish_reason="stop")

    async def stop(self, message: EndRequests) -> None:
        self.ended.append(message.client_request_id)

    async def show(self, card: AdapterCard) -> None:
        self.cards[card.name] = card

    async def hide(self, name: str) -> None:
        self.cards.pop(name, None)


class FakeFleet:
    """Workers by their numbers. at_router: those that the router knows of, in the order that it picks them in."""

    def __init__(self, num_workers: int, max_bytes: int = 1 << 22, replaces: bool = True) -> None:
        self.workers: dict[int, FakeWorker] = {}
        for number in range(1, num_workers + 1):
            self.workers[number] = FakeWorker(self, number, max_bytes, replaces)
        self.at_router = list(self.workers)
        self.num_picked = 0
        self.begun: list[str] = []
        self.freed: list[str] = []

    def kill(self, worker_id: int) -> None:
        """The worker is gone, which the router does not know yet."""
        del self.workers[worker_id]

    def __getitem__(self, worker_id: int) -> FakeWorker:
        return self.workers[worker_id]

    async def best_worker(self, token_ids: list[int], **_: Any) -> tuple[int, int, int]:
        if not self.at_router:
            raise RuntimeError("no instances")
        self.num_picked += 1
        return self.at_router[(self.num_picked - 1) % len(self.at_router)], 0, 0

    async def mark_prefill_complete(self, request_id: str) -> None:
        self.begun.append(request_id)

    async def free(self, request_id: str) -> None:
        self.freed.append(request_id)


class FakeClient:
    """Carries messages as JSON, as Dynamo does."""

    def __init__(self, fleet: FakeFleet) -> None:
        self._fleet = fleet

    def instance_ids(self) -> list[int]:
        return list(self._fleet.workers)

    async def direct(self, request: Any, instance_id: int, annotated: bool, context: Any) -> AsyncIterator[Any]:
        if instance_id not in self._fleet.workers:
            raise ConnectionError(f"no instance {instance_id}")
        worker = self._fleet.workers[instance_id]
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
                if worker.lies and isinstance(message, ReadPages):
                    chunk = worker_chunk(msgspec.structs.replace(answer, piece=bytes(len(answer.piece))))  # type: ignore[union-attr]
                yield json.loads(json.dumps(chunk))
        yield END


def _info(task_id: TaskId, worker_id: int) -> AdapterInfo:
    location: Any = "DEVICE" if worker_id == 2 else "HOST"
    number = int(str(task_id))
    return AdapterInfo(number, "", "d", "READY_FOR_USE", location, 1, (4,), 0, False, 0.0, worker_id)
