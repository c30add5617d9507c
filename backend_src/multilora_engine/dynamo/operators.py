"""`EngineOperator`: asks the engine about its adapters, from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from multilora_engine.dynamo.fleet_messages import Carry, EndRequests, Upload
from multilora_engine.dynamo.streams import OutputStream
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
from multilora_engine.request import TokenOutput
from multilora_engine.serving.front import new_id
from multilora_wire.adapter_info import AdapterInfo

_Report = TypeVar("_Report")


class EngineOperator:
    """Each method raises the engine's RequestError."""

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    async def list_adapters(self) -> list[AdapterInfo]:
        """The adapters of all tiers and all sources."""
        return (await self._ask(ListAdapters(), AdapterList)).adapters

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
