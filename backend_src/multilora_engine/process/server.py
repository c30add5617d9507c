"""`EngineServer`: serves an engine to its fronts. One thread owns sockets and engine, and sleeps without work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from multilora_engine.engine.block_events import BlockEvent, BlockEvents
from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats
from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import AdapterNotKept, DeviceDead, EngineUnavailable, InternalError, RequestError
from multilora_engine.lora.adapter_events import AdapterEventLog
from multilora_engine.lora.adapter_sets import AdapterSets
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.names import TaskId, label_of
from multilora_engine.lora.remote import RemoteAdapters
from multilora_engine.lora.versions import Expectation
from multilora_engine.process.adapter_operator import AdapterOperator, ManagedWeights, PendingReport
from multilora_engine.process.fronts import Fronts
from multilora_engine.process.liveness import DrainOrder, Heartbeat
from multilora_engine.process.messages import (
    MAX_QUEUED_MESSAGES,
    Abort,
    AdapterHeader,
    AdapterTaken,
    Add,
    BlockChanges,
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
    read_adapter,
)
from multilora_engine.process.operations import ListAdapters, LoadReport, ModelReport, Report
from multilora_engine.process.routes import RateLimits, Route, Routes
from multilora_engine.process.telemetry import AdapterUsage, RequestTelemetry
from multilora_engine.request import GenerationRequest, TokenOutput

_MAX_WAITING = 1 << 16
"""How many events wait for a front that does not read. A front that misses one gets no more: it knows a wrong cache."""


class BlockWatch:
    """Sends the prefix cache's events to the front that watches, at most one. Events wait until it can take them."""

    def __init__(self, events: BlockEvents, fronts: Fronts) -> None:
        self._events = events
        self._fronts = fronts
        self._front: bytes | None = None
        self._waiting: list[BlockEvent] = []

    def begin(self, front: bytes) -> None:
        """Send events to `front` from now on."""
        self._front = front
        self._events.want()
        self._events.take()
        self._waiting.clear()

    def flush(self) -> None:
        """Send the events so far."""
        self._waiting += self._events.take()
        if not self._waiting or self._front is None:
            return
        if self._front not in self._fronts or len(self._waiting) > _MAX_WAITING:
            self._front = None
            self._waiting.clear()
        elif self._fronts.send(self._front, BlockChanges(self._waiting)):
            self._waiting = []


class ServedEngine(Protocol):
    """The part of `multilora_engine.engine.engine.Engine` that the server uses."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def loras(self) -> LoRAManager: ...
    @property
    def remote(self) -> RemoteAdapters: ...
    @property
    def sets(self) -> AdapterSets: ...
    @property
    def lora_events(self) -> AdapterEventLog: ...
    @property
    def weights(self) -> ManagedWeights: ...
    @property
    def block_events(self) -> BlockEvents: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def adapters_in_use(self) -> AdaptersInUse: ...
    def put_adapter(self, lora_task_id: TaskId, adapter: PackedAdapter, name: str = "") -> None: ...
    def add_request(self, request: GenerationRequest, call_id: str) -> GenerationRequest: ...
    def give_prompt(self, request: GenerationRequest) -> int: ...
    def abort(self, request_id: str) -> TokenOutput | None: ...
    def step(self, on_progress: Callable[[], None]) -> list[TokenOutput]: ...
    def is_device_dead(self) -> bool: ...
    def note_sent(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class AwaitedAnswer:
    """An answer to a front that is not ready yet. `answer` is called once `is_ready`; it may raise a RequestError."""

    front: bytes
    request_id: str
    is_ready: Callable[[], bool]
    answer: Callable[[], TokenOutput]


def upload_output(done: TokenOutput, task_id: TaskId, write: Future[None]) -> TokenOutput:
    """`done`, after the adapter's file is written, so that no acknowledged adapter is lost. Raises AdapterNotKept."""
    try:
        write.result()
    except OSError as error:
        raise AdapterNotKept(task_id, str(error)) from error
    except CancelledError:
        logger.info("LoRA task %s was unloaded or replaced before its file was written", label_of(task_id))
    return done


def report_output(request_id: str, report: Report) -> TokenOutput:
    """The final output of an operation: its text is the report, in JSON."""
    return TokenOutput(request_id, [], msgspec.json.encode(report).decode(), finish_reason="stop")


_MAX_MESSAGES_PER_STEP = 256
"""The most messages between two steps: a flood of requests must not keep running requests from their next step."""

_MAX_RECEIVE_S = 0.005
"""The most time for receiving between two steps, for the same reason. An adapter of 9 MB takes about as long, so a step
waits for one of them."""

_WAIT_POLL_MS = 5
"""How often an idle engine looks whether answers that wait for a file or a source are ready."""

_WATCH_POLL_MS = 1000
"""How often an idle engine looks whether a watched folder has changed."""

_MAX_FAILED_STEPS = 2
"""After this many failed steps in a row the process ends: a new one may help. It ends at once if the device is dead."""

logger = logging.getLogger(__name__)


class EngineServer:
    """The loop around an engine: receive, step, send."""

    def __init__(
        self,
        engine: ServedEngine,
        router: zmq.Socket[bytes],
        parent_fd: int,
        usage: AdapterUsage,
        heartbeat: Heartbeat,
        drain: DrainOrder,
    ) -> None:
        self._engine = engine
        self._heartbeat = heartbeat
        self._usage = usage
        self._clients = AdapterUsage(usage.max_adapters)
        self._rates = RateLimits()
        self._telemetry = RequestTelemetry()
        self._operator = AdapterOperator(
            engine.loras,
            engine.remote,
            engine.sets,
            engine.lora_events,
            usage,
            self._clients,
            self._read_load,
            ModelReport.of(engine.info),
            engine.weights,
        )
        self._fronts = Fronts(router, self._drop_front)
        self._block_watch = BlockWatch(engine.block_events, self._fronts)
        self._parent_fd = parent_fd
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(parent_fd, zmq.POLLIN | zmq.POLLERR)
        self._poller.register(drain.fd, zmq.POLLIN)
        self._drain = drain
        self._is_draining = False
        self._routes = Routes()
        self._awaited: list[AwaitedAnswer] = []
        self._failed_steps = 0

    def run(self) -> None:
        """Serve until the parent process is gone. Raises the error of step() when the engine is beyond help, and
        DeviceDead.
        """
        while not self._parent_is_gone():
            self._heartbeat.beat()
            self._receive()
            if self._engine.has_work:
                self._step()
            self._send_awaited()
            self._block_watch.flush()
            self._fronts.flush()
            self._engine.note_sent()
            if self._is_draining and not (self._routes or self._awaited or self._fronts.has_unsent):
                self._drain.fulfil()

    def _parent_is_gone(self) -> bool:
        events = dict(self._poller.poll(self._poll_timeout_ms()))
        if self._drain.fd in events:
            logger.info("no more requests are taken, %d are in flight", len(self._routes))
            self._poller.unregister(self._drain.fd)
            self._is_draining = True
        return self._parent_fd in events

    def _poll_timeout_ms(self) -> int | None:
        if self._engine.has_work:
            return 0
        if self._awaited or self._fronts.has_unsent:
            return _WAIT_POLL_MS
        beat_ms = None if self._heartbeat.interval_s is None else round(self._heartbeat.interval_s * 1e3)
        return min(beat_ms or _WATCH_POLL_MS, _WATCH_POLL_MS) if self._engine.remote.is_watching else beat_ms

    def _receive(self) -> None:
        started = time.monotonic()
        for _ in range(_MAX_MESSAGES_PER_STEP):
            received = self._fronts.receive()
            if received is None:
                return
            self._handle(*received)
            self._heartbeat.beat()
            if time.monotonic() - started > _MAX_RECEIVE_S:
                return

    def _handle(self, front: bytes, frame: memoryview, payload: memoryview) -> None:
        try:
            message = decode_to_engine(frame)
        except msgspec.MsgspecError as error:
            logger.error("message refused: %s", error)
            self._fronts.send(front, Refused(f"malformed message: {error}"))
            return
        if isinstance(message, Hello):
            self._fronts.greet(front, message, self._engine.info)
        elif front in self._fronts:
            self._dispatch(front, message, payload)
        else:
            self._fronts.send(front, Refused("the first message must be Hello"))

    def _dispatch(self, front: bytes, message: ToEngine, payload: memoryview) -> None:
        match message:
            case Add():
                self._answer(front, message.requests[0].request_id, lambda: self._add(front, message, payload))
            case PutAdapter():
                self._answer(front, message.request_id, lambda: self._put(front, message, payload))
            case GivePrompt():
                self._give_prompt(message.request)
            case Stop():
                self._answer(front, message.request_id, lambda: self._stop(front, message))
            case Operate():
                self._answer(front, message.request_id, lambda: self._operate(front, message))
            case Abort():
                self._abort(message.request_ids)
            case WatchBlocks():
                self._block_watch.begin(front)

    def _answer(self, front: bytes, request_id: str, handle: Callable[[], None]) -> None:
        """Carry out a message. An error in it is the answer to its own request only, unless the device is dead."""
        try:
            handle()
        except RequestError as error:
            self._fronts.add(front, error_output(request_id, error))
        except Exception as error:
            logger.exception("request %s failed", request_id)
            self._check_device(error)
            self._fronts.add(front, error_output(request_id, _internal(error)))

    def _add(self, front: bytes, message: Add, payload: memoryview) -> None:
        try:
            self._check_open()
            sender, call_id = message.requests[0].sender, message.requests[0].request_id
            self._rates.admit(sender, len(message.requests))
            if message.adapter is not None:
                message.check_sent()
                self._put_adapter(message.adapter, payload, message.requests[0].lora_name)
                self._fronts.send(front, AdapterTaken(call_id))
            for request in message.requests:
                accepted = self._engine.add_request(request, message.client_request_id or call_id)
                self._routes[request.request_id] = Route(
                    front,
                    call_id,
                    message.client_request_id,
                    sender,
                    accepted.task_id,
                    message.trace_id,
                )
                if not sender.is_canary:
                    self._telemetry.begin(request.request_id, accepted.task_id)
                self._rates.charge(sender, request.num_prompt_tokens)
        except Exception as error:
            num_refused = sum(request.request_id not in self._routes for request in message.requests)
            self._abort([request.request_id for request in message.requests])
            code = error.code if isinstance(error, RequestError) else InternalError.code
            if not message.requests[0].sender.is_canary:
                self._telemetry.refuse(code, num_refused)
            raise

    def _check_open(self) -> None:
        if self._is_draining:
            raise EngineUnavailable("the server is shutting down")

    def _put(self, front: bytes, message: PutAdapter, payload: memoryview) -> None:
        self._check_open()
        self._rates.admit(message.sender, 1)
        header, expectation = message.adapter, Expectation(replaced=message.expected_digest)
        present = self._engine.loras.inventory.digest(header.task_id)
        expectation.check(header.lora_task_id, message.lora_name, present, header.digest)
        write = self._put_adapter(message.adapter, payload, message.lora_name)
        self._fronts.send(front, AdapterTaken(message.request_id))
        digest, name = message.adapter.digest, message.lora_name
        done = TokenOutput(message.request_id, [], "", finish_reason="stop", lora_digest=digest, lora_name=name)
        if write is None:
            self._fronts.add(front, done)
            return
        answer = partial(upload_output, done, message.adapter.task_id, write)
        self._awaited.append(AwaitedAnswer(front, message.request_id, write.done, answer))

    def _put_adapter(self, header: AdapterHeader, payload: memoryview, lora_name: str) -> Future[None] | None:
        self._engine.put_adapter(header.task_id, read_adapter(header, payload), lora_name)
        return self._engine.loras.save(header.task_id)

    def _give_prompt(self, request: GenerationRequest) -> None:
        """An error is the last output of the request, which has ended then."""
        if (route := self._routes.get(request.request_id)) is None:
            return  # it has ended meanwhile
        try:
            num_tokens_before = self._engine.give_prompt(request)
        except RequestError as error:
            self._emit([error_output(request.request_id, error)])
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            self._check_device(error)
            self._engine.abort(request.request_id)
            self._emit([error_output(request.request_id, _internal(error))])
        else:
            self._rates.charge(route.sender, max(0, len(request.prompt_token_ids) - num_tokens_before))

    def _stop(self, front: bytes, message: Stop) -> None:
        for request_id in self._routes.named_by(message, self._engine.info.clients.stop_needs_sender):
            output = self._engine.abort(request_id)
            assert output is not None, f"{request_id} has a route but is unknown to the engine"
            self._emit([output])
        self._fronts.add(front, TokenOutput(message.request_id, [], "", finish_reason="stop"))

    def _operate(self, front: bytes, message: Operate) -> None:
        # A door looks a name up to admit a request, which is the one that counts.
        is_look_up = isinstance(message.operation, ListAdapters) and message.operation.names
        self._rates.admit(message.sender, 0 if is_look_up else 1)
        report = self._operator.execute(message.operation, message.scope)
        if not isinstance(report, PendingReport):
            self._fronts.add(front, report_output(message.request_id, report))
            return
        answer = partial(_awaited_report, message.request_id, report)
        self._awaited.append(AwaitedAnswer(front, message.request_id, report.is_ready, answer))

    def _send_awaited(self) -> None:
        for awaited in [awaited for awaited in self._awaited if awaited.is_ready()]:
            self._awaited.remove(awaited)
            self._answer(awaited.front, awaited.request_id, partial(self._send_answer, awaited))

    def _send_answer(self, awaited: AwaitedAnswer) -> None:
        self._fronts.add(awaited.front, awaited.answer())

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (route := self._routes.pop(request_id, None)) is not None:
                self._engine.abort(request_id)
                if not route.sender.is_canary:
                    self._telemetry.drop(request_id)

    def _step(self) -> None:
        try:
            outputs = self._engine.step(self._heartbeat.beat)
        except Exception as error:
            self._fail_all(error)
            return
        self._failed_steps = 0
        self._emit(outputs)

    def _fail_all(self, error: Exception) -> None:
        """Fail all requests: after an exception in a step, none of them can be trusted to go on."""
        self._failed_steps += 1
        logger.exception("step failed, %d requests are lost", len(self._routes))
        self._check_device(error)
        lost = list(self._routes)
        self._emit([error_output(request_id, _internal(error)) for request_id in lost])
        self._fronts.flush()
        if self._failed_steps >= _MAX_FAILED_STEPS:
            raise error
        for request_id in lost:
            self._engine.abort(request_id)

    def _check_device(self, error: Exception) -> None:
        """Raises DeviceDead if the device died of `error`. The fronts fail all requests when the process has ended."""
        if self._engine.is_device_dead():
            raise DeviceDead(f"the device is dead after {type(error).__name__}: {error}") from error

    def _emit(self, outputs: list[TokenOutput]) -> None:
        self._telemetry.record([output for output in outputs if not self._is_canarys(output.request_id)])
        for output in outputs:
            route = self._routes[output.request_id]
            self._rates.charge(route.sender, output.num_new_tokens)
            self._fronts.add(route.front, output)
            if output.is_final:
                self._end(route, output)

    def _is_canarys(self, request_id: str) -> bool:
        return self._routes[request_id].sender.is_canary

    def _end(self, route: Route, output: TokenOutput) -> None:
        del self._routes[output.request_id]
        if route.sender.is_canary and output.error_code is None:
            return  # An answer every few seconds would be most of the log of an idle server.
        adapter = "none" if route.task_id is None else label_of(route.task_id)
        if route.task_id is not None:
            self._usage.record(adapter, output.num_prompt_tokens, output.num_output_tokens)
        if route.sender.name:
            self._clients.record(route.sender.name, output.num_prompt_tokens, output.num_output_tokens)
        logger.info(
            "request %s%s, adapter %s: %s, %d + %d tokens%s",
            route.client_request_id or output.request_id,
            f" of {route.sender.name}" if route.sender.name else "",
            adapter,
            output.finish_reason or output.error_code,
            output.num_prompt_tokens,
            output.num_output_tokens,
            f", trace {route.trace_id}" if route.trace_id else "",
        )

    def _read_load(self) -> LoadReport:
        return LoadReport(self._engine.stats, self._engine.adapters_in_use, self._telemetry.stats)

    def _drop_front(self, front: bytes) -> None:
        lost = self._routes.of_front(front)
        logger.warning("a front is gone, %d of its requests are aborted", len(lost))
        self._abort(lost)


def serve(
    engine: ServedEngine,
    socket_path: Path,
    parent_fd: int,
    usage: AdapterUsage,
    heartbeat: Heartbeat,
    drain: DrainOrder,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Bind the socket and serve until `parent_fd` reaches its end. Count in `usage`, and show life by `heartbeat`.

    After the order to `drain`, no more requests are taken. `on_ready` is called once fronts can connect. Raises as
    `EngineServer.run`.
    """
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        router.set(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        router.set(zmq.RCVHWM, 0)
        # Without it ROUTER drops messages to a front that is gone silently, and its requests would run on for no
        # client.
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.bind(f"ipc://{socket_path}")
        on_ready()
        EngineServer(engine, router, parent_fd, usage, heartbeat, drain).run()


def _awaited_report(request_id: str, pending: PendingReport) -> TokenOutput:
    return report_output(request_id, pending.report())


def _internal(error: Exception) -> InternalError:
    return InternalError(f"{type(error).__name__}: {error}")
