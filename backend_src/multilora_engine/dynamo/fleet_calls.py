"""`FleetCalls`: answers the messages that a worker gets from the fronts of its fleet and from the other workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec

from multilora_engine.dynamo.adapters import FleetAdapters
from multilora_engine.dynamo.cards import card_of
from multilora_engine.dynamo.catalogue import FleetCatalogue
from multilora_engine.dynamo.engine_calls import EngineCalls
from multilora_engine.dynamo.fleet_aliases import WorkerAliases
from multilora_engine.dynamo.fleet_messages import (
    AliasTable,
    Announce,
    Carry,
    Describe,
    Described,
    EndRequests,
    FindUpload,
    Forget,
    Found,
    FromWorker,
    Generate,
    LearnAliases,
    PagesPiece,
    ReadAliases,
    ReadNews,
    ReadPages,
    Said,
    TakePiece,
    ToWorker,
    Upload,
)
from multilora_engine.dynamo.fleet_uploads import FleetUploads
from multilora_engine.dynamo.page_store import pieces
from multilora_engine.errors import AdapterNotFound, InternalError, InvalidRequest, RequestError
from multilora_engine.lora.names import scoped_task_id, task_id_of
from multilora_engine.process.messages import error_output
from multilora_engine.process.operations import (
    AdapterReport,
    LoadAdapter,
    PinAdapter,
    RemoveAlias,
    SetAlias,
    UnloadAdapter,
    UnpinAdapter,
)
from multilora_engine.request import TokenOutput
from multilora_engine.serving.front import new_id

_DONE = Said(TokenOutput("", [], "", finish_reason="stop"))

_OnAdapter = LoadAdapter | PinAdapter | UnpinAdapter | UnloadAdapter


class MessageHandler(Protocol):
    """The part of `EngineOperator` that is needed."""

    async def carry(self, message: Carry) -> TokenOutput: ...
    async def stop(self, message: EndRequests) -> None: ...


class FleetCalls:
    """Answers each message with the errors that it raises, as they are: codes and texts are the same everywhere."""

    def __init__(
        self,
        calls: EngineCalls,
        operator: MessageHandler,
        uploads: FleetUploads,
        adapters: FleetAdapters,
        catalogue: FleetCatalogue,
        aliases: WorkerAliases,
        description: Described,
    ) -> None:
        self._calls = calls
        self._operator = operator
        self._uploads = uploads
        self._adapters = adapters
        self._catalogue = catalogue
        self._aliases = aliases
        self._description = description
        self._module_names = description.info.adapter_layout.sites.part_names

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
                    yield PagesPiece(piece)
            case ReadNews(state):
                for news in self._uploads.news() if state != self._uploads.state else ():
                    yield Found(news) if isinstance(news, Upload) else news
            case _:
                yield await self._answer_once(message)

    async def _answer_once(self, message: ToWorker) -> FromWorker:
        match message:
            case TakePiece(upload, offset, piece):
                taken = await self._catalogue.take_piece(upload, offset, piece)
                return _DONE if taken is None else Found(taken)
            case Announce(upload, keeps):
                await self._catalogue.learn(upload)
                if keeps:
                    await self._uploads.keep(upload)
            case Forget():
                await self._catalogue.learn(message)
            case FindUpload(lora_task_id, tenant):
                return Found(self._uploads.find(scoped_task_id(tenant, lora_task_id)))
            case Carry():
                return Said(await self._carry(message))
            case EndRequests():
                await self._operator.stop(message)
            case LearnAliases(aliases):
                await self._aliases.learn(aliases)
            case ReadAliases():
                return AliasTable(self._aliases.table.news)
            case Describe():
                return self._description
            case _:
                raise InternalError(f"{type(message).__name__} has no answer")
        return _DONE

    async def _generate(self, message: Generate, call_id: str) -> AsyncGenerator[FromWorker, None]:
        if message.upload is not None:
            await self._catalogue.learn(message.upload)
        request_id = message.client_request_id or message.request.request_id
        request = await self._aliases.resolve(message.request, request_id)
        # A front asks again as soon as it has written a chat; the engine may still have the call before.
        request = msgspec.structs.replace(request, request_id=new_id())
        outputs = self._calls.generate(request, call_id, message.client_request_id, message.trace_id)
        async with aclosing(outputs):
            async for output in outputs:
                if output is not None:
                    yield Said(msgspec.structs.replace(output, request_id=message.request.request_id))

    def _pages(self, pages_digest: str) -> bytearray:
        pages = self._uploads.pages(pages_digest)
        if pages is None:
            raise InvalidRequest(f"there are no pages of digest {pages_digest} here")
        return pages

    async def _carry(self, message: Carry) -> TokenOutput:
        operation = message.operation
        match operation:
            case LoadAdapter() | PinAdapter() | UnpinAdapter() | UnloadAdapter():
                return await self._carry_on(operation, message)
            case SetAlias() | RemoveAlias():
                return await self._aliases.change(message, operation)
            case _:
                return await self._operator.carry(message)

    async def _carry_on(self, operation: _OnAdapter, message: Carry) -> TokenOutput:
        """Carry out an operation on one adapter, which the engine may not have yet, or not any more."""
        number, name = _number(operation), operation.name or ""
        task_id = scoped_task_id(operation.tenant, number)
        if digest := self._uploads.digest(task_id):
            # The version of the fleet counts. The engine may have an earlier one.
            operation.expectation.check(number, name, digest, digest)
            operation = msgspec.structs.replace(operation, expected_digest=None)
            message = msgspec.structs.replace(message, operation=operation)
        if isinstance(operation, UnloadAdapter):
            # This comes first, and also if the engine lacks the adapter: it would come back with the next request. An
            # engine that compares the digest may refuse, so that it comes before.
            is_compared = operation.expected_digest is not None
            if not is_compared:
                await self._catalogue.forget(task_id, name)
            output = await self._operator.carry(message)
            if is_compared:
                await self._catalogue.forget(task_id, name)
            info = msgspec.json.decode(output.text, type=AdapterReport).adapter
            if info.name and not info.tenant:
                await self._adapters.hide(info.name)
            return output
        if isinstance(operation, LoadAdapter) and operation.path:
            await self._catalogue.read(number, name, operation.source, operation.path)
            message = msgspec.structs.replace(message, operation=LoadAdapter(number, operation.name))
        await self._uploads.bring(task_id)
        try:
            output = await self._operator.carry(message)
        except RequestError as error:
            if error.code != AdapterNotFound.code or not await self._uploads.bring(task_id, is_lost=True):
                raise
            output = await self._operator.carry(message)
        info = msgspec.json.decode(output.text, type=AdapterReport).adapter
        if isinstance(operation, LoadAdapter) and info.name and not info.tenant:
            await self._adapters.show(card_of(info, self._module_names))
        return output


def _number(operation: _OnAdapter) -> int:
    """The number of the task id that an operation names."""
    return task_id_of(operation.name or "") if operation.lora_task_id is None else operation.lora_task_id
