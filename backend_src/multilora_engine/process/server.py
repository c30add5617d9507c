"""`EngineServer`: the engine process. One thread owns the socket and the engine, and sleeps when there is no work.

`python -m multilora_engine.process.server` reads one JSON line (`Launch`) on stdin, loads the engine, binds the socket,
and reports on stdout (`Started` or `StartFailed`). It ends when stdin does: the front that started it is gone. SIGTERM
drains it, see drain.py.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO

import msgspec
import zmq

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats
from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import (
    AdapterNotFound,
    AdapterNotKept,
    ConfigError,
    EngineUnavailable,
    InternalError,
    InvalidRequest,
    PermissionDenied,
    RequestError,
)
from multilora_engine.log_lines import configure_logging
from multilora_engine.lora.adapter_events import AdapterEvents
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.names import TaskId, label_of
from multilora_engine.lora.remote import RemoteAdapters
from multilora_engine.process.adapter_operator import AdapterOperator, ManagedAdapters, PendingReport
from multilora_engine.process.drain import DrainOrder
from multilora_engine.process.heartbeat import Heartbeat
from multilora_engine.process.messages import (
    PROTOCOL_VERSION,
    Abort,
    AdapterHeader,
    AdapterTaken,
    Add,
    FromEngine,
    Hello,
    Launch,
    Operate,
    Outputs,
    PutAdapter,
    Refused,
    Started,
    StartFailed,
    StartReport,
    Stop,
    ToEngine,
    Welcome,
    decode_to_engine,
    encode,
    error_output,
    read_adapter,
)
from multilora_engine.process.outbox import MAX_QUEUED_MESSAGES, Outbox
from multilora_engine.process.rates import RateLimits
from multilora_engine.process.reports import LoadReport, ModelReport, Report
from multilora_engine.process.telemetry import RequestTelemetry
from multilora_engine.process.usage import AdapterUsage
from multilora_engine.request import GenerationRequest, Sender, TokenOutput

_MAX_MESSAGES_PER_STEP = 256
"""So that a flood of requests cannot keep the running ones from their next step."""

_MAX_RECEIVE_S = 0.02
"""The same for a flood of large ones: behind the message that takes it beyond this, a step comes first."""

_WAIT_POLL_MS = 5
"""How often an idle engine looks whether what an answer waits for is done: a file written, a source listed."""

_SWITCH_INTERVAL_S = 0.0005
"""How long a thread that fetches or compiles may keep the interpreter from a step, which asks for it many times."""

_MAX_FAILED_STEPS = 2
"""In a row. A device that failed for good fails every step; only a new process helps then."""

logger = logging.getLogger(__name__)


class ServedAdapters(ManagedAdapters, Protocol):
    """What the server and its operator need of `multilora_engine.lora.manager.LoRAManager`."""

    def save(self, lora_task_id: TaskId) -> Future[None] | None: ...


class ServedEngine(Protocol):
    """What the server needs of `multilora_engine.engine.engine.Engine`."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def loras(self) -> ServedAdapters: ...
    @property
    def remote(self) -> RemoteAdapters: ...
    @property
    def lora_events(self) -> AdapterEvents: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def adapters_in_use(self) -> AdaptersInUse: ...
    def put_adapter(self, lora_task_id: TaskId, adapter: PackedAdapter, name: str = "") -> None: ...
    def add_request(self, request: GenerationRequest) -> None: ...
    def abort(self, request_id: str) -> TokenOutput | None: ...
    def step(self, on_progress: Callable[[], None]) -> list[TokenOutput]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Route:
    """Where the outputs of a request go, whom and which adapter it is counted for, and what the log calls it.

    call_id: the same for the requests that came together.
    """

    front: bytes
    call_id: str
    client_request_id: str
    sender: Sender
    task_id: TaskId | None
    trace_id: str


@dataclass(frozen=True, slots=True)
class _Upload:
    """An adapter that is cached, and answered for once its file is written: what was acknowledged is never lost."""

    front: bytes
    done: TokenOutput
    task_id: TaskId
    write: Future[None]

    def answer(self) -> TokenOutput:
        try:
            self.write.result()
        except OSError as error:
            return error_output(self.done.request_id, AdapterNotKept(self.task_id, str(error)))
        except CancelledError:
            logger.info("LoRA task %s was unloaded or replaced before its file was written", label_of(self.task_id))
        return self.done


@dataclass(frozen=True, slots=True)
class _AwaitedReport:
    """An operation that is answered when its report is ready."""

    front: bytes
    request_id: str
    pending: PendingReport


class EngineServer:
    """The loop around an engine: receive, step, send. One message per front and step.

    ZeroMQ's own thread writes to the sockets. A front that does not read delays nobody: what a request has for it
    waits, and is joined when it does.

    `_routes` holds exactly the requests the engine has accepted and not finished.
    """

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
            engine.lora_events,
            usage,
            self._clients,
            self._read_load,
            _describe(engine.info),
        )
        self._router = router
        self._parent_fd = parent_fd
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(parent_fd, zmq.POLLIN | zmq.POLLERR)
        self._poller.register(drain.fd, zmq.POLLIN)
        self._drain = drain
        self._is_draining = False
        self._fronts: set[bytes] = set()
        self._routes: dict[str, _Route] = {}
        self._uploads: list[_Upload] = []
        self._reports: list[_AwaitedReport] = []
        self._outbox = Outbox()
        self._failed_steps = 0

    def run(self) -> None:
        """Serve until the parent process is gone. Raises what step() raised when the engine is beyond help."""
        while not self._parent_is_gone():
            self._heartbeat.beat()
            self._receive()
            if self._engine.has_work:
                self._step()
            self._acknowledge_uploads()
            self._send_reports()
            self._flush()
            if self._is_draining and not (self._routes or self._uploads or self._outbox):
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
        if self._uploads or self._reports or self._outbox:
            return _WAIT_POLL_MS
        return None if self._heartbeat.interval_s is None else round(self._heartbeat.interval_s * 1e3)

    def _receive(self) -> None:
        started = time.monotonic()
        for _ in range(_MAX_MESSAGES_PER_STEP):
            try:
                front, header, *payload = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._handle(front.bytes, header.buffer, payload[0].buffer if payload else memoryview(b""))
            self._heartbeat.beat()
            if time.monotonic() - started > _MAX_RECEIVE_S:
                return

    def _handle(self, front: bytes, header: memoryview, payload: memoryview) -> None:
        try:
            message = decode_to_engine(header)
        except msgspec.MsgspecError as error:
            logger.error("message refused: %s", error)
            self._send(front, Refused(f"malformed message: {error}"))
            return
        if isinstance(message, Hello):
            self._greet(front, message)
        elif front in self._fronts:
            self._dispatch(front, message, payload)
        else:
            self._send(front, Refused("the first message must be Hello"))

    def _greet(self, front: bytes, hello: Hello) -> None:
        if hello.protocol_version == PROTOCOL_VERSION:
            self._fronts.add(front)
            self._send(front, Welcome(self._engine.info))
            return
        reason = (
            f"the front speaks protocol version {hello.protocol_version} and the engine {PROTOCOL_VERSION}; "
            "restart the server after an update, so that both run the same multilora_engine"
        )
        logger.error("front refused: %s", reason)
        self._send(front, Refused(reason))

    def _dispatch(self, front: bytes, message: ToEngine, payload: memoryview) -> None:
        match message:
            case Add():
                self._answer(front, message.requests[0].request_id, lambda: self._add(front, message, payload))
            case PutAdapter():
                self._answer(front, message.request_id, lambda: self._put(front, message, payload))
            case Stop():
                self._answer(front, message.request_id, lambda: self._stop(front, message))
            case Operate():
                self._answer(front, message.request_id, lambda: self._operate(front, message))
            case Abort():
                self._abort(message.request_ids)

    def _answer(self, front: bytes, request_id: str, handle: Callable[[], None]) -> None:
        """Whatever goes wrong with a message is the answer to its request, and to nothing else."""
        try:
            handle()
        except RequestError as error:
            self._outbox.add(front, error_output(request_id, error))
        except Exception as error:
            logger.exception("request %s failed", request_id)
            self._outbox.add(front, error_output(request_id, _internal(error)))

    def _add(self, front: bytes, message: Add, payload: memoryview) -> None:
        try:
            self._check_open()
            sender = message.requests[0].sender
            self._rates.admit(sender, len(message.requests))
            if message.adapter is not None:
                self._put_adapter(message.adapter, payload, message.requests[0].lora_name)
                self._send(front, AdapterTaken(message.requests[0].request_id))
            for request in message.requests:
                self._add_request(request)
                self._routes[request.request_id] = _Route(
                    front,
                    message.requests[0].request_id,
                    message.client_request_id,
                    sender,
                    request.task_id,
                    message.trace_id,
                )
                self._telemetry.begin(request.request_id)
                self._rates.charge(sender, len(request.prompt_token_ids))
        except Exception as error:
            num_refused = sum(request.request_id not in self._routes for request in message.requests)
            self._abort([request.request_id for request in message.requests])
            code = error.code if isinstance(error, RequestError) else InternalError.code
            self._telemetry.refuse(code, num_refused)
            raise

    def _add_request(self, request: GenerationRequest) -> None:
        try:
            self._engine.add_request(request)
        except AdapterNotFound as error:
            raise error.under_name(request.lora_name) from None

    def _check_open(self) -> None:
        if self._is_draining:
            raise EngineUnavailable("the server is shutting down")

    def _put(self, front: bytes, message: PutAdapter, payload: memoryview) -> None:
        self._check_open()
        self._rates.admit(message.sender, 1)
        write = self._put_adapter(message.adapter, payload, message.lora_name)
        self._send(front, AdapterTaken(message.request_id))
        done = TokenOutput(message.request_id, [], "", finish_reason="stop", lora_digest=message.adapter.digest)
        if write is None:
            self._outbox.add(front, done)
        else:
            self._uploads.append(_Upload(front, done, message.adapter.task_id, write))

    def _put_adapter(self, header: AdapterHeader, payload: memoryview, lora_name: str) -> Future[None] | None:
        self._engine.put_adapter(header.task_id, read_adapter(header, payload), lora_name)
        return self._engine.loras.save(header.task_id)

    def _acknowledge_uploads(self) -> None:
        for upload in [upload for upload in self._uploads if upload.write.done()]:
            self._uploads.remove(upload)
            self._outbox.add(upload.front, upload.answer())

    def _stop(self, front: bytes, message: Stop) -> None:
        for request_id in self._named_by(message):
            output = self._engine.abort(request_id)
            assert output is not None, f"{request_id} has a route but is unknown to the engine"
            self._emit([output])
        self._outbox.add(front, TokenOutput(message.request_id, [], "", finish_reason="stop"))

    def _named_by(self, message: Stop) -> list[str]:
        """The requests in flight that a stop means: never those of another sender.

        An id that the engine issued names its request. An id that the client chose is as good from a sender who is
        known. Those who are not known are all the same, so theirs must be the id of one call alone; and the operator
        may have closed that way. Raises InvalidRequest, PermissionDenied.
        """
        name, wanted, is_known = message.sender.name, message.client_request_id, message.sender.is_known
        issued = self._routes.get(wanted)
        if issued is not None and issued.sender.name == name:
            return [wanted]
        if not is_known and self._engine.info.clients.stop_needs_sender:
            raise PermissionDenied(
                "a stop by a request id of one's own needs an API key, or a proxy that names the client; without them "
                "name the stop_id of the answer"
            )
        own = self._requests_of(name)
        named = [request_id for request_id in own if self._routes[request_id].client_request_id == wanted]
        if not is_known and len({self._routes[request_id].call_id for request_id in named}) > 1:
            raise InvalidRequest(f"several requests in flight have the id {wanted!r}; name the stop_id of the answer")
        return named

    def _requests_of(self, name: str) -> list[str]:
        return [request_id for request_id, route in self._routes.items() if route.sender.name == name]

    def _operate(self, front: bytes, message: Operate) -> None:
        self._rates.admit(message.sender, 1)
        report = self._operator.execute(message.operation, message.scope)
        if isinstance(report, PendingReport):
            self._reports.append(_AwaitedReport(front, message.request_id, report))
        else:
            self._report(front, message.request_id, report)

    def _send_reports(self) -> None:
        for awaited in [awaited for awaited in self._reports if awaited.pending.is_ready()]:
            self._reports.remove(awaited)
            self._answer(awaited.front, awaited.request_id, partial(self._report_awaited, awaited))

    def _report_awaited(self, awaited: _AwaitedReport) -> None:
        self._report(awaited.front, awaited.request_id, awaited.pending.report())

    def _report(self, front: bytes, request_id: str, report: Report) -> None:
        text = msgspec.json.encode(report).decode()
        self._outbox.add(front, TokenOutput(request_id, [], text, finish_reason="stop"))

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._routes.pop(request_id, None) is not None:
                self._engine.abort(request_id)
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
        """After an exception out of a step, no request in the engine can be trusted to go on."""
        self._failed_steps += 1
        logger.exception("step failed, %d requests are lost", len(self._routes))
        lost = list(self._routes)
        self._emit([error_output(request_id, _internal(error)) for request_id in lost])
        self._flush()
        if self._failed_steps >= _MAX_FAILED_STEPS:
            raise error
        for request_id in lost:
            self._engine.abort(request_id)

    def _emit(self, outputs: list[TokenOutput]) -> None:
        self._telemetry.record(outputs)
        for output in outputs:
            route = self._routes[output.request_id]
            self._rates.charge(route.sender, output.num_output_tokens if output.beams else len(output.token_ids))
            self._outbox.add(route.front, output)
            if output.is_final:
                self._end(route, output)

    def _end(self, route: _Route, output: TokenOutput) -> None:
        del self._routes[output.request_id]
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

    def _flush(self) -> None:
        for front in self._outbox.fronts:
            if self._address(front):
                self._router.send(encode(Outputs(self._outbox.take(front))))

    def _send(self, front: bytes, message: FromEngine) -> None:
        """Something that is no output; who has not read what it was sent before goes without."""
        if self._address(front):
            self._router.send(encode(message))

    def _address(self, front: bytes) -> bool:
        """Begin a message to a front. False if it is gone, or has not read what it was sent before."""
        try:
            self._router.send(front, zmq.SNDMORE | zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop_front(front)
            return False
        return True

    def _drop_front(self, front: bytes) -> None:
        lost = [request_id for request_id, route in self._routes.items() if route.front == front]
        logger.warning("a front is gone, %d of its requests are aborted", len(lost))
        self._fronts.discard(front)
        self._outbox.take(front)
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
    """Bind the socket and serve until `parent_fd` reaches its end, counting in `usage`, showing life by `heartbeat`.

    After the order to `drain` no more requests are taken. `on_ready` is called once fronts can connect.
    """
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        router.set(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        router.set(zmq.RCVHWM, 0)
        # Without it ROUTER drops silently what goes to a front that is gone, and its requests would run on for nobody.
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.bind(f"ipc://{socket_path}")
        on_ready()
        EngineServer(engine, router, parent_fd, usage, heartbeat, drain).run()


def main(create_engine: Callable[[EngineConfig], ServedEngine]) -> None:
    """Run an engine process: read `Launch`, load, report, serve."""
    configure_logging("engine")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    report_stream = _take_stdout()
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    try:
        config = EngineConfig.from_parameters(launch.parameters)
        engine = create_engine(config)
    except ConfigError as error:
        _report(report_stream, StartFailed(str(error)))
        raise SystemExit(1) from None
    except Exception as error:
        logger.exception("the engine cannot start")
        _report(report_stream, StartFailed(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
    _settle()
    socket_path = Path(launch.socket_path)
    with closing(DrainOrder(socket_path)) as drain, closing(engine):
        signal.signal(signal.SIGTERM, drain.give)
        usage = AdapterUsage(config.lora.lora_metrics_max_adapters)
        heartbeat = Heartbeat(launch.heartbeat_fd, launch.heartbeat_interval_s)
        on_ready = partial(_report, report_stream, Started())
        serve(engine, socket_path, sys.stdin.fileno(), usage, heartbeat, drain, on_ready)


def _settle() -> None:
    """Keep what has been loaded out of later garbage collections: of pauses between steps, and of the process's end."""
    gc.collect()
    gc.freeze()


def _take_stdout() -> TextIO:
    """The stream of the report. Whatever a library prints goes to stderr from here on."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stream


def _report(stream: TextIO, report: StartReport) -> None:
    stream.write(msgspec.json.encode(report).decode() + "\n")
    stream.close()


def _describe(info: EngineInfo) -> ModelReport:
    return ModelReport(Path(info.model_path).name, info.max_model_len, info.vocab_size, info.version)


def _internal(error: Exception) -> InternalError:
    return InternalError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Engine)
