"""`EngineCalls`: requests to a worker's engine, from Dynamo's front and from the fleet's own fronts.

`EngineOperator` asks the engine about its adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import Protocol, TypeVar

import msgspec

from multilora_engine.dynamo.fleet_messages import Carry, EndRequests, Upload
from multilora_engine.dynamo.streams import OpenStreams, OutputStream
from multilora_engine.errors import AdapterNotFound, EngineUnavailable, RequestError
from multilora_engine.lora.names import TaskId, scoped_task_id
from multilora_engine.process.client import EngineClient
from multilora_engine.process.messages import read_adapter
from multilora_engine.process.operations import (
    AdapterList,
    AdapterReport,
    EventList,
    ListAdapters,
    LoadAdapter,
    Operation,
    ReadEvents,
    ReadStats,
    StatsReport,
    UnloadAdapter,
)
from multilora_engine.request import GenerationRequest, TokenOutput
from multilora_engine.serving.front import new_id
from multilora_wire.adapter_info import AdapterInfo, Alias

_Report = TypeVar("_Report")


class EngineOperator:
    """Each method raises the engine's RequestError."""

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    async def list_adapters(self) -> list[AdapterInfo]:
        """The adapters of all tiers and all sources."""
        return (await self._ask(ListAdapters(), AdapterList)).adapters

    async def digests(self, names: Collection[str], tenant: str) -> dict[TaskId, str]:
        """The digests of those adapters of a tenant, or of the server, that a tier has under these names."""
        found = (await self._ask(ListAdapters([*names], tenant), AdapterList)).adapters
        return {scoped_task_id(info.tenant, info.lora_task_id): info.digest for info in found}

    async def list_aliases(self) -> list[Alias]:
        """The aliases that the engine has."""
        return (await self._ask(ListAdapters(), AdapterList)).aliases

    async def load(self, name: str) -> AdapterInfo:
        """Load the adapter that the engine or its sources have under a name into memory."""
        return (await self._ask(LoadAdapter(name=name), AdapterReport)).adapter

    async def unload(self, lora_task_id: int, tenant: str = "") -> AdapterInfo:
        """Forget an adapter; requests that run with it keep it."""
        return (await self._ask(UnloadAdapter(lora_task_id, tenant=tenant), AdapterReport)).adapter

    async def events_since(self, number: int) -> EventList:
        """The events of adapters after the one of this number."""
        return await self._ask(ReadEvents(number), EventList)

    async def stats(self) -> StatsReport:
        """The engine's load, and its work so far."""
        return await self._ask(ReadStats(), StatsReport)

    async def carry(self, message: Carry) -> TokenOutput:
        """Carry out an operation for a front of the fleet; the report is the text of the output."""
        return await self._hear(
            lambda stream, request_id: self._client.operate(
                stream, request_id, message.operation, message.scope, message.sender
            )
        )

    async def stop(self, message: EndRequests) -> None:
        """End requests; they finish as cancelled."""
        await self._hear(
            lambda stream, request_id: self._client.stop(stream, request_id, message.client_request_id, message.sender)
        )

    async def put(self, upload: Upload, pages: bytearray) -> None:
        """Give the engine an adapter. pages: its pages as they lie in memory."""
        adapter = read_adapter(upload.header, memoryview(pages))
        await self._hear(
            lambda stream, request_id: self._client.put_adapter(
                stream, request_id, upload.task_id, adapter, upload.name
            )
        )

    async def _ask(self, operation: Operation, report: type[_Report]) -> _Report:
        output = await self._hear(lambda stream, request_id: self._client.operate(stream, request_id, operation))
        return msgspec.json.decode(output.text, type=report)

    async def _hear(self, submit: Callable[[OutputStream, str], None]) -> TokenOutput:
        """The one output of a call."""
        stream = OutputStream(self._client, self._loop)
        submit(stream, new_id())
        try:
            (output,) = await stream.next()
        finally:
            stream.cancel()
        return output


class KnownUploads(Protocol):
    """The part of `FleetUploads` that is needed."""

    def digest(self, task_id: TaskId) -> str: ...
    def is_behind(self, task_id: TaskId) -> bool: ...
    async def bring(self, task_id: TaskId, is_lost: bool = False) -> bool: ...


class _OtherVersion(Exception):
    """The engine has an adapter from its sources, where the fleet knows of an upload."""


class EngineCalls:
    """The engine answers with the latest version of an adapter that this worker has heard of, or not at all.

    An engine that evicted an upload, or was started again, would answer with the adapter that its sources have under
    the name. The first output tells which version answers; if it is another version, the upload is brought again.

    call_id: the id that Dynamo gave the call, by which it is aborted.
    """

    def __init__(
        self, client: EngineClient, loop: asyncio.AbstractEventLoop, streams: OpenStreams, uploads: KnownUploads
    ) -> None:
        self._client = client
        self._loop = loop
        self._streams = streams
        self._uploads = uploads

    async def generate(
        self, asked: GenerationRequest, call_id: str, client_request_id: str, trace_id: str
    ) -> AsyncGenerator[TokenOutput | None, None]:
        """The outputs of a request; None at the end if it was cancelled. Raises RequestError."""
        task_id = asked.task_id
        if task_id is not None and self._uploads.is_behind(task_id):
            await self._uploads.bring(task_id)
        try:
            async with aclosing(self._checked(asked, call_id, client_request_id, trace_id)) as outputs:
                async for output in outputs:
                    yield output
                return
        except _OtherVersion:
            assert task_id is not None, "the base model has no versions"
            await self._uploads.bring(task_id, is_lost=True)
        except RequestError as error:
            # The engine refuses a request so before its first output, if no tier has the adapter any more.
            if error.code != AdapterNotFound.code or task_id is None:
                raise
            if not await self._uploads.bring(task_id, is_lost=True):
                raise
        try:
            async with aclosing(self._checked(asked, call_id, client_request_id, trace_id)) as outputs:
                async for output in outputs:
                    yield output
        except _OtherVersion:
            raise EngineUnavailable(
                f"LoRA task {task_id} was brought to the engine, which has lost it again; try again"
            ) from None

    async def _checked(
        self, asked: GenerationRequest, call_id: str, client_request_id: str, trace_id: str
    ) -> AsyncGenerator[TokenOutput | None, None]:
        """The outputs. Raises _OtherVersion if the version that answers is not the known one."""
        task_id = asked.task_id
        wanted = "" if task_id is None else self._uploads.digest(task_id)
        is_checked = not wanted
        async with aclosing(self._try(asked, call_id, client_request_id, trace_id)) as outputs:
            async for output in outputs:
                if not is_checked and output is not None and task_id is not None:
                    # A later upload may have come meanwhile.
                    if output.lora_digest not in (wanted, self._uploads.digest(task_id)):
                        raise _OtherVersion
                    is_checked = True
                yield output

    async def _try(
        self, asked: GenerationRequest, call_id: str, client_request_id: str, trace_id: str
    ) -> AsyncGenerator[TokenOutput | None, None]:
        with self._streams.opened(call_id, OutputStream(self._client, self._loop)) as stream:
            self._client.generate(stream, [asked], client_request_id, trace_id=trace_id)
            while not stream.is_cancelled():
                for output in await stream.next():
                    yield output
                    if output.is_final:
                        return
            yield None
