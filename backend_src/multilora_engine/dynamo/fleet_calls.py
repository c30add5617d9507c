"""`FleetCalls`: what a worker does for the fronts of its fleet, and for the other workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Protocol

import msgspec

from multilora_engine.dynamo.card import AdapterCard, card_of
from multilora_engine.dynamo.engine_calls import EngineCalls
from multilora_engine.dynamo.fleet_messages import (
    Announce,
    Carry,
    Describe,
    Described,
    EndRequests,
    FindUpload,
    Found,
    FromWorker,
    Generate,
    Piece,
    ReadPages,
    Said,
    TakePiece,
    ToWorker,
    Upload,
)
from multilora_engine.dynamo.fleet_uploads import FleetUploads
from multilora_engine.dynamo.page_store import pieces
from multilora_engine.errors import InternalError, InvalidRequest, RequestError
from multilora_engine.lora.names import scoped_task_id, task_id_of
from multilora_engine.process.messages import error_output
from multilora_engine.process.operations import LoadAdapter, UnloadAdapter
from multilora_engine.process.reports import AdapterReport
from multilora_engine.request import TokenOutput

_DONE = Said(TokenOutput("", [], "", finish_reason="stop"))


class Operator(Protocol):
    """The part of `EngineOperator` that is needed."""

    async def carry(self, message: Carry) -> TokenOutput: ...
    async def stop(self, message: EndRequests) -> None: ...


class Cards(Protocol):
    """The part of `FleetAdapters` that is needed."""

    async def show(self, card: AdapterCard) -> None: ...
    async def hide(self, name: str) -> None: ...


class FleetCalls:
    """Answers each message with the errors that it raises, as they are: codes and texts are the same everywhere."""

    def __init__(
        self,
        calls: EngineCalls,
        operator: Operator,
        uploads: FleetUploads,
        cards: Cards,
        description: Described,
        module_names: Mapping[int, str],
    ) -> None:
        self._calls = calls
        self._operator = operator
        self._uploads = uploads
        self._cards = cards
        self._description = description
        self._module_names = module_names

    async def answer(self, message: ToWorker, call_id: str) -> AsyncGenerator[FromWorker, None]:
        """The answers to a message; an error is the last one."""
        try:
            async with aclosing(self._answers(message, call_id)) as answers:
                async for answer in answers:
                    yield answer
        except RequestError as error:
            request_id = message.request.request_id if isinstance(message, Generate) else ""
            yield Said(error_output(request_id, error))

    async def _answers(self, message: ToWorker, call_id: str) -> AsyncGenerator[FromWorker, None]:
        match message:
            case Generate():
                async with aclosing(self._generate(message, call_id)) as outputs:
                    async for output in outputs:
                        yield output
            case ReadPages(pages_digest):
                for _, piece in pieces(self._pages(pages_digest)):
                    yield Piece(piece)
            case _:
                yield await self._answer_once(message)

    async def _answer_once(self, message: ToWorker) -> FromWorker:
        match message:
            case TakePiece(upload, offset, piece):
                if await self._uploads.take_piece(upload, offset, piece):
                    await self._show(upload)
            case Announce(upload):
                self._uploads.learn(upload)
                await self._show(upload)
            case FindUpload(lora_task_id, tenant):
                return Found(self._uploads.find(scoped_task_id(tenant, lora_task_id)))
            case Carry():
                return Said(await self._carry(message))
            case EndRequests():
                await self._operator.stop(message)
            case Describe():
                return self._description
            case _:
                raise InternalError(f"{type(message).__name__} has no answer")
        return _DONE

    async def _generate(self, message: Generate, call_id: str) -> AsyncGenerator[FromWorker, None]:
        if message.upload is not None:
            self._uploads.learn(message.upload)
            await self._uploads.bring(message.upload.task_id)
        outputs = self._calls.generate(message.request, call_id, message.client_request_id, message.trace_id)
        async with aclosing(outputs):
            async for output in outputs:
                if output is not None:
                    yield Said(output)

    def _pages(self, pages_digest: str) -> bytearray:
        pages = self._uploads.pages(pages_digest)
        if pages is None:
            raise InvalidRequest(f"there are no pages of digest {pages_digest} here")
        return pages

    async def _carry(self, message: Carry) -> TokenOutput:
        operation = message.operation
        if isinstance(operation, UnloadAdapter):
            # First of all, and also where the engine does not have it: it would come back with the next request.
            self._uploads.forget(scoped_task_id(operation.tenant, _number(operation)))
        output = await self._operator.carry(message)
        if isinstance(operation, LoadAdapter | UnloadAdapter):
            info = msgspec.json.decode(output.text, type=AdapterReport).adapter
            if info.name and not info.tenant:
                is_loaded = isinstance(operation, LoadAdapter)
                await (
                    self._cards.show(card_of(info, self._module_names)) if is_loaded else self._cards.hide(info.name)
                )
        return output

    async def _show(self, upload: Upload) -> None:
        """Put an upload that has a name, and is no tenant's own, where Dynamo's front finds it."""
        if upload.name and not upload.header.tenant:
            rows = upload.header.rows
            ranks = tuple(sorted({row.rank for row in rows}))
            modules = tuple(self._module_names[module_id] for module_id in sorted({row.module_id for row in rows}))
            await self._cards.show(AdapterCard(upload.name, upload.header.digest, ranks, modules))


def _number(operation: UnloadAdapter) -> int:
    """The number of the task id that an operation names."""
    return task_id_of(operation.name or "") if operation.lora_task_id is None else operation.lora_task_id
