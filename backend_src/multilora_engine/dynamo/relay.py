"""`FleetRelay`: takes the place of an engine process before its fronts, and passes the work to a fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import zmq

from multilora_engine.dynamo.fleet_messages import EndRequests, Generate, Said
from multilora_engine.dynamo.fleet_operations import FleetOperator
from multilora_engine.dynamo.fleet_router import FleetRouter
from multilora_engine.dynamo.front_uploads import FrontUploads
from multilora_engine.dynamo.workers import WorkerGone, Workers
from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import AdapterNotFound, EngineUnavailable, InternalError, RequestError, Unsupported
from multilora_engine.process.fronts import Fronts
from multilora_engine.process.liveness import DrainOrder
from multilora_engine.process.messages import (
    Abort,
    AdapterHeader,
    AdapterTaken,
    Add,
    GivePrompt,
    Hello,
    Operate,
    PutAdapter,
    Refused,
    Stop,
    ToEngine,
    WatchBlocks,
    decode_to_engine,
    error_output,
)
from multilora_engine.request import GenerationRequest, TokenOutput

_RETRY_S = 0.005
"""The interval at which a front that is behind with reading is tried again."""

logger = logging.getLogger(__name__)


class FleetRelay:
    """Speaks with fronts as `EngineServer` does, so that every door is the same with a fleet behind it.

    A request whose worker is lost before its first output goes to another worker; a request with outputs on their way
    to the client fails with UNAVAILABLE, as when an engine dies. All methods run in one event loop.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        workers: Workers,
        router: FleetRouter,
        uploads: FrontUploads,
        operator: FleetOperator,
        info: EngineInfo,
        drain: DrainOrder,
    ) -> None:
        self._socket = socket
        self._fronts = Fronts(socket, self._drop_front)
        self._workers = workers
        self._router = router
        self._uploads = uploads
        self._operator = operator
        self._info = info
        self._drain = drain
        self._is_draining = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._prompts: dict[str, asyncio.Future[GenerationRequest]] = {}
        self._front_of: dict[str, bytes] = {}
        self._flush_is_due = False
        self._loop = asyncio.get_running_loop()

    @property
    def num_requests(self) -> int:
        """Calls in flight."""
        return len(self._tasks)

    def start(self) -> None:
        """Serve from now on."""
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._loop.add_reader(self._drain.fd, self._begin_drain)
        self._receive()

    def close(self) -> None:
        """Serve no more; calls in flight end at their workers."""
        self._loop.remove_reader(self._socket.fileno())
        if not self._is_draining:
            self._loop.remove_reader(self._drain.fd)
        for task in self._tasks.values():
            task.cancel()

    def _begin_drain(self) -> None:
        logger.info("no more requests are taken, %d are in flight", len(self._tasks))
        self._loop.remove_reader(self._drain.fd)
        self._is_draining = True
        self._check_drained()

    def _check_drained(self) -> None:
        if self._is_draining and not self._tasks and not self._fronts.has_unsent:
            self._drain.fulfil()

    def _receive(self) -> None:
        # ZeroMQ signals the first message only: every message that has come is read, also after each send.
        while (received := self._fronts.receive()) is not None:
            self._handle(*received)

    def _handle(self, front: bytes, frame: memoryview, payload: memoryview) -> None:
        try:
            message = decode_to_engine(frame)
        except msgspec.MsgspecError as error:
            logger.error("message refused: %s", error)
            self._fronts.send(front, Refused(f"malformed message: {error}"))
            return
        if isinstance(message, Hello):
            self._fronts.greet(front, message, self._info)
        elif front in self._fronts:
            self._dispatch(front, message, payload)
        else:
            self._fronts.send(front, Refused("the first message must be Hello"))

    def _dispatch(self, front: bytes, message: ToEngine, payload: memoryview) -> None:
        match message:
            case Add():
                first = self._begin_add(front, message, payload)
                for request in message.requests:
                    self._begin(front, request.request_id, self._generate(front, message, request, first))
            case PutAdapter():
                self._begin(front, message.request_id, self._put(front, message, payload))
            case GivePrompt(request):
                if (prompt := self._prompts.get(request.request_id)) is not None and not prompt.done():
                    prompt.set_result(request)
            case Stop():
                self._begin(front, message.request_id, self._stop(front, message))
            case Operate():
                self._begin(front, message.request_id, self._operate(front, message))
            case Abort():
                for request_id in message.request_ids:
                    self._abort(request_id)
            case WatchBlocks():
                logger.debug("a fleet tells no events of blocks")

    def _begin(self, front: bytes, request_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(self._try(front, request_id, work))
        self._tasks[request_id], self._front_of[request_id] = task, front
        task.add_done_callback(partial(self._end, request_id))

    def _end(self, request_id: str, _: asyncio.Task[None]) -> None:
        self._tasks.pop(request_id, None)
        self._front_of.pop(request_id, None)
        self._check_drained()

    async def _try(self, front: bytes, request_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of a call; an error becomes its answer."""
        try:
            if self._is_draining:
                work.close()
                raise EngineUnavailable("the server is shutting down")
            await work
        except RequestError as error:
            self._send(front, error_output(request_id, error))
        except Exception as error:
            logger.exception("request %s failed", request_id)
            self._send(front, error_output(request_id, InternalError(f"{type(error).__name__}: {error}")))

    def _begin_add(self, front: bytes, message: Add, payload: memoryview) -> asyncio.Task[int] | None:
        """Begin the upload of the adapter that came with requests. The task's result is the worker that has it."""
        if message.adapter is None:
            return None
        return self._loop.create_task(self._upload(message, message.adapter, payload))

    async def _upload(self, message: Add, header: AdapterHeader, payload: memoryview) -> int:
        first = message.requests[0]
        try:
            message.check_sent()
            return await self._uploads.take(header, first.lora_name, payload, partial(self._router.pick, first, ()))
        finally:
            if first.request_id not in self._tasks:
                # It was aborted, perhaps before the router was asked: the router would count it for ever.
                await self._router.ended(first.request_id)

    async def _generate(
        self, front: bytes, message: Add, request: GenerationRequest, upload: asyncio.Task[int] | None
    ) -> None:
        try:
            if request.lora_set:
                raise Unsupported("sets of adapters in a fleet; combine the adapters' files, and send the sum")
            if request.lora_path:
                raise Unsupported("lora_path in a fleet; send the adapter's name to the model generation")
            worker_id = None
            if upload is None:
                # Here, too: the router is asked for a worker that has the member.
                call_id = message.client_request_id or message.requests[0].request_id
                # A worker that knows the alias alone has this request of the call alone.
                request = msgspec.structs.replace(request, lora_session=request.lora_session or call_id)
                request = self._operator.aliases.resolve(request, call_id, self._uploads.digest)
                await self._uploads.settle(request.task_id)
            else:
                picked = await asyncio.shield(upload)
                if request is message.requests[0]:
                    self._fronts.send(front, AdapterTaken(request.request_id))
                    worker_id = picked
            written: GenerationRequest | None = request
            while written is not None:
                written = await self._answer(front, message, written, worker_id)
        finally:
            await self._router.ended(request.request_id)

    async def _answer(
        self, front: bytes, message: Add, request: GenerationRequest, worker_id: int | None
    ) -> GenerationRequest | None:
        """Send the outputs of a request. Returns the request with its prompt if the worker's engine asked for that.

        The worker's call ends then; the next one asks again if another version of the adapter answers it.
        """
        prompt: asyncio.Future[GenerationRequest] = self._loop.create_future()
        async with aclosing(self._outputs(message, request, worker_id)) as outputs:
            async for output in outputs:
                if output.asked_use is not None:
                    self._prompts[request.request_id] = prompt
                self._send(front, output)
                if output.asked_use is not None:
                    break
            else:
                return None
        try:
            written = await prompt
            return msgspec.structs.replace(
                # Which has the member of an alias that was chosen.
                request,
                prompt_token_ids=written.prompt_token_ids,
                sampling=written.sampling,
                chat_use=written.chat_use,
            )
        finally:
            del self._prompts[request.request_id]

    async def _outputs(
        self, message: Add, request: GenerationRequest, worker_id: int | None
    ) -> AsyncGenerator[TokenOutput, None]:
        """The outputs of a request. worker_id: the worker to ask first, None for the router's choice."""
        upload = self._uploads.find(request.task_id)
        asked = Generate(request, message.client_request_id, message.trace_id, upload)
        refused_by: list[int] = []
        was_sent_again = False
        while True:
            if worker_id is None:
                worker_id = await self._router.pick(request, refused_by)
            has_begun = False
            try:
                async with aclosing(self._workers.call(worker_id, asked)) as answers:
                    async for answer in answers:
                        assert isinstance(answer, Said), f"{type(answer).__name__} is no output"
                        output = answer.output
                        is_missing = output.error_code == AdapterNotFound.code and upload is not None
                        if is_missing and not has_begun and not was_sent_again:
                            break
                        if not has_begun:
                            has_begun = True
                            if upload is not None and output.lora_digest not in ("", upload.header.digest):
                                # The worker has heard of this version, so that it answers with no earlier one.
                                self._uploads.drop(upload)
                            await self._router.begun(request.request_id)
                        yield output
                        if output.is_final:
                            return
                assert upload is not None, "a worker ends its answer with a final output, or is lost"
                was_sent_again = True
                await self._uploads.send_again(upload, worker_id)
            except WorkerGone:
                if has_begun:
                    raise
                refused_by.append(worker_id)
                worker_id = None

    async def _put(self, front: bytes, message: PutAdapter, payload: memoryview) -> None:
        if message.expected_digest:
            raise Unsupported(
                "lora_expected_digest of an upload in a fleet: its workers take uploads at the same time; upload each "
                "version under a name of its own"
            )
        await self._uploads.take(message.adapter, message.lora_name, payload, self._router.pick_any)
        self._fronts.send(front, AdapterTaken(message.request_id))
        digest, name = message.adapter.digest, message.lora_name
        done = TokenOutput(message.request_id, [], "", finish_reason="stop", lora_digest=digest, lora_name=name)
        self._send(front, done)

    async def _stop(self, front: bytes, message: Stop) -> None:
        """Make all workers end the requests of the id, also requests that came through other fronts."""
        await self._workers.ask_all(EndRequests(message.client_request_id, message.sender))
        self._send(front, TokenOutput(message.request_id, [], "", finish_reason="stop"))

    async def _operate(self, front: bytes, message: Operate) -> None:
        self._send(front, await self._operator.carry_out(message))

    def _abort(self, request_id: str) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def _drop_front(self, front: bytes) -> None:
        lost = [request_id for request_id, of in self._front_of.items() if of == front]
        logger.warning("a front is gone, %d of its requests are aborted", len(lost))
        for request_id in lost:
            self._abort(request_id)

    def _send(self, front: bytes, output: TokenOutput) -> None:
        self._fronts.add(front, output)
        self._flush_soon(0.0)

    def _flush_soon(self, delay_s: float) -> None:
        """Flush after a delay: outputs that come at the same time go in one message."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_later(delay_s, self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        self._fronts.flush()
        if self._fronts.has_unsent:
            self._flush_soon(_RETRY_S)
        self._receive()
        self._check_drained()
