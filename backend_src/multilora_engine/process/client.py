"""`EngineClient`: a front's end of the wire to the engine process.

One thread owns the socket and calls every listener, because a Triton stub must never send responses from two threads.
Any thread may submit. If the listeners are slower than the engine, outputs of one request that wait are delivered as
one output.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from multilora_engine.engine.block_events import BlockEvent
from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import Cancelled, ConfigError, EngineUnavailable, InternalError, RequestError
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.names import TaskId
from multilora_engine.process.messages import (
    MAX_QUEUED_MESSAGES,
    PROTOCOL_VERSION,
    Abort,
    AdapterScope,
    AdapterTaken,
    Add,
    BlockChanges,
    FromEngine,
    GivePrompt,
    Hello,
    Operate,
    Outputs,
    PutAdapter,
    Refused,
    Stop,
    ToEngine,
    WatchBlocks,
    Welcome,
    adapter_header,
    adapter_payload,
    decode_from_engine,
    encode,
    error_output,
    join_outputs,
)
from multilora_engine.process.operations import Operation
from multilora_engine.request import GenerationRequest, Sender, TokenOutput

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_RECONNECT_INTERVAL_MS = 50


class Connection:
    """A socket of a front, with a monitor that notices the death of the engine. Only one thread uses it.

    It waits until there is an engine. ZeroMQ would reconnect the same socket to the next engine, and would deliver
    messages to it that were meant for the dead one. So a lost connection is closed with all its messages.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket_path: Path) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        # With a limit, the engine notices that this front reads too slowly, and joins its outputs.
        self._socket.set(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_INTERVAL_MS)
        self._monitor = self._socket.get_monitor_socket(_LOST)
        self._socket.connect(f"ipc://{socket_path}")
        self.send(Hello(PROTOCOL_VERSION))

    @property
    def pollable(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """The descriptors to wait for: readable if there is a message, or if the connection may be lost."""
        return self._socket, self._monitor

    def send(self, message: ToEngine, payload: memoryview | None = None) -> None:
        frames: list[bytes | memoryview] = [encode(message)]
        if payload is not None:
            frames.append(payload)
        self._socket.send_multipart(frames, copy=False)

    def receive(self) -> list[FromEngine]:
        """All messages that have arrived. Does not wait."""
        messages: list[FromEngine] = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return messages
            messages.append(decode_from_engine(*(frame.buffer for frame in frames)))

    def is_lost(self) -> bool:
        """Whether the engine is gone. Does not wait."""
        lost = False
        while self._monitor.poll(0):
            lost = bool(recv_monitor_message(self._monitor)["event"] & _LOST) or lost
        return lost

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class Claims:
    """The shares of limits that a call holds: some until the engine has its adapter, others until the call ends.

    The end of the call gives back both, each once.
    """

    def __init__(self) -> None:
        self.until_taken = ExitStack()
        self.until_ended = ExitStack()

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Give back both if the block raises, because the call never reached the engine."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.until_taken.close()
        self.until_ended.close()


_CANCELLATION_INTERVAL_S = 0.1
"""How often the client asks Triton which requests are cancelled. Each request is a question of its own. A question
wakes a thread here and one in the server, as a token does. A cancelled request only costs its part of a few steps.
"""
_CANCELLATION_GRACE_S = 0.08
"""How long a question waits for outputs to come first. To wake for the question alone would cost as much again."""
_CANCELLATION_DUTY = 0.1
"""The largest share of the thread's time that questions may take. Each takes a round trip."""

NOBODY = Sender()
"""The sender of every request if there are no API keys and no proxy that names clients."""

EVERYTHING = AdapterScope()
"""The scope of the people who run the server."""

logger = logging.getLogger(__name__)


_Request = Add | PutAdapter | Stop | Operate


class Listener(Protocol):
    """The receiver of the outputs of a call. Only the client's thread calls it.

    A call of n requests ends when each request has had its final output, or with the first error. When all listeners
    have heard the outputs that arrived, each is told to `flush` its answers. The listeners with the fewest
    `unsent_bytes` go first.
    """

    @property
    def unsent_bytes(self) -> int: ...

    def on_output(self, output: TokenOutput) -> None: ...

    def flush(self) -> None: ...

    def is_cancelled(self) -> bool: ...


class BlockListener(Protocol):
    """The receiver of the prefix cache's events. Only the client's thread calls it."""

    def on_events(self, events: list[BlockEvent]) -> None: ...

    def on_loss(self) -> None:
        """The engine is gone, and the next one knows nothing."""


@dataclass(eq=False, slots=True)
class _Call:
    """Requests that are answered together."""

    listener: Listener
    open_request_ids: set[str]
    claims: Claims


class EngineClient:
    """Submits calls to the engine and hears about them. Every accepted call ends exactly once.

    `_calls` has one entry for each request in flight; only the client's thread touches it.
    """

    def __init__(self, socket_path: Path, block_listener: BlockListener | None = None) -> None:
        """block_listener: hears the events of the engine's prefix cache. No other front hears them then."""
        self._block_listener = block_listener
        self._socket_path = socket_path
        self._tasks: deque[Callable[[], None]] = deque()
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_closing = False
        self._calls: dict[str, _Call] = {}
        self._next_cancellation_check = 0.0
        self._state = threading.Condition()
        self._info: EngineInfo | None = None
        self._refusal: str | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection = Connection(self._context, socket_path)
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return len(self._calls)

    @property
    def has_engine(self) -> bool:
        """Whether an engine has welcomed this front and is not known to be gone."""
        return self._info is not None

    def wait_until_ready(self, timeout_s: float) -> EngineInfo:
        """The engine's description, once the engine has welcomed this front.

        Raises ConfigError if the engine refused this front, EngineUnavailable if it has not answered in time.
        """
        with self._state:
            self._state.wait_for(lambda: self._info or self._refusal, timeout_s)
            if self._refusal:
                raise ConfigError(self._refusal)
            if self._info is None:
                raise EngineUnavailable("the engine is not running or has not finished loading")
            return self._info

    def generate(
        self,
        listener: Listener,
        requests: list[GenerationRequest],
        client_request_id: str = "",
        adapter: tuple[TaskId, PackedAdapter] | None = None,
        trace_id: str = "",
        claims: Claims | None = None,
    ) -> None:
        """Have `requests` answered to `listener`. The engine first stores `adapter` (task id, weights), if given."""
        message = Add(requests, client_request_id, adapter_header(*adapter) if adapter else None, trace_id)
        request_ids = [request.request_id for request in requests]
        payload = adapter_payload(adapter[1]) if adapter else None
        self._submit(listener, request_ids, message, payload, claims)

    def put_adapter(
        self,
        listener: Listener,
        request_id: str,
        task_id: TaskId,
        adapter: PackedAdapter,
        lora_name: str = "",
        claims: Claims | None = None,
        sender: Sender = NOBODY,
        expected_digest: str = "",
    ) -> None:
        """Store an adapter. Its one output has finish reason `stop` and the digest.

        expected_digest: the digest of the version that the new one replaces, empty for any version or none.
        """
        message = PutAdapter(request_id, adapter_header(task_id, adapter), lora_name, sender, expected_digest)
        self._submit(listener, [request_id], message, adapter_payload(adapter), claims)

    def give_prompt(self, request: GenerationRequest) -> None:
        """Go on with a request whose listener was asked for a prompt, if it has not ended."""
        self.call_soon(lambda: self._give_prompt(request))

    def refuse_prompt(self, request_id: str, error: RequestError) -> None:
        """End the call of a request whose listener was asked for a prompt, with the reason why there is none."""
        self.call_soon(lambda: self._deliver([error_output(request_id, error)]))

    def stop(self, listener: Listener, request_id: str, client_request_id: str, sender: Sender = NOBODY) -> None:
        """End the sender's requests with this id, as `cancelled`. Its one output has finish reason `stop`."""
        self._submit(listener, [request_id], Stop(request_id, client_request_id, sender), None)

    def operate(
        self,
        listener: Listener,
        request_id: str,
        operation: Operation,
        scope: AdapterScope = EVERYTHING,
        sender: Sender = NOBODY,
    ) -> None:
        """Carry out an operation on adapters. Its one output has finish reason `stop` and the report as its text."""
        self._submit(listener, [request_id], Operate(request_id, operation, scope, sender), None)

    def call_soon(self, task: Callable[[], None]) -> None:
        """Run `task` on the client's thread."""
        self._tasks.append(task)
        os.eventfd_write(self._wakeup_fd, 1)

    def close(self) -> None:
        """Fail the calls in flight and end the thread. A second call does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wakeup_fd, 1)
        self._thread.join()
        os.close(self._wakeup_fd)

    def _submit(
        self,
        listener: Listener,
        request_ids: list[str],
        message: _Request,
        payload: memoryview | None,
        claims: Claims | None = None,
    ) -> None:
        call = _Call(listener, set(request_ids), claims or Claims())
        self.call_soon(lambda: self._send(call, request_ids, message, payload))

    def _run(self) -> None:
        while not self._is_closing:
            self._wait()
            self._run_tasks()
            self._receive()
            self._check_cancellations()
        self._set_state(None, "the server is shutting down")
        self._run_tasks()
        self._fail_all(EngineUnavailable("the server is shutting down"))
        self._connection.close()
        self._context.term()

    def _wait(self) -> None:
        sources = [(source, zmq.POLLIN) for source in (*self._connection.pollable, self._wakeup_fd)]
        due_s = max(0.0, self._next_cancellation_check + _CANCELLATION_GRACE_S - time.monotonic())
        zmq.zmq_poll(sources, int(due_s * 1000) + 1 if self._calls else -1)

    def _run_tasks(self) -> None:
        try:
            os.eventfd_read(self._wakeup_fd)
        except BlockingIOError:
            return
        while self._tasks:
            task = self._tasks.popleft()
            try:
                task()
            except Exception:
                logger.exception("a task of the engine client failed")

    def _send(self, call: _Call, request_ids: list[str], message: _Request, payload: memoryview | None) -> None:
        self._calls.update(dict.fromkeys(request_ids, call))
        if self._info is None:
            reason = self._refusal or "the engine is starting; try again"
            self._deliver([error_output(request_ids[0], EngineUnavailable(reason))])
            return
        try:
            self._connection.send(message, payload)
        except Exception as error:
            logger.exception("request %s cannot be sent", request_ids[0])
            self._deliver([error_output(request_ids[0], InternalError(f"{type(error).__name__}: {error}"))])

    def _give_prompt(self, request: GenerationRequest) -> None:
        if self._info is not None and request.request_id in self._calls:
            self._connection.send(GivePrompt(request))

    def _receive(self) -> None:
        # Asked before reading: messages that arrived before the loss are in the socket, and they still count.
        is_lost = self._connection.is_lost()
        outputs: list[TokenOutput] = []
        for message in self._connection.receive():
            outputs += self._read(message)
        self._deliver(join_outputs(outputs))
        if is_lost:
            self._reconnect()

    def _read(self, message: FromEngine) -> list[TokenOutput]:
        match message:
            case Outputs(outputs):
                return outputs
            case BlockChanges(events):
                self._tell_of_blocks(lambda listener: listener.on_events(events))
            case Welcome(info):
                if self._block_listener is not None:
                    self._connection.send(WatchBlocks(), None)
                self._set_state(info, None)
            case Refused(reason):
                logger.error("the engine refused this front: %s", reason)
                self._set_state(None, reason)
            case AdapterTaken(request_id):
                if (call := self._calls.get(request_id)) is not None:
                    call.claims.until_taken.close()
        return []

    def _reconnect(self) -> None:
        # The supervisor says that the engine is gone; each front says so only if it lost something.
        level = logging.ERROR if self._calls else logging.INFO
        logger.log(level, "the engine is gone, %d requests in flight are lost", len(self._calls))
        self._set_state(None, None)
        self._tell_of_blocks(lambda listener: listener.on_loss())
        self._fail_all(EngineUnavailable("the engine process died; it is being restarted, try again"))
        self._connection.close()
        self._connection = Connection(self._context, self._socket_path)

    def _tell_of_blocks(self, tell: Callable[[BlockListener], None]) -> None:
        """Hand over events. A block listener that raises, for example without its router, loses only these events."""
        if self._block_listener is not None:
            try:
                tell(self._block_listener)
            except Exception:
                logger.exception("events of the prefix cache are lost")

    def _set_state(self, info: EngineInfo | None, refusal: str | None) -> None:
        with self._state:
            self._info, self._refusal = info, refusal
            self._state.notify_all()

    def _fail_all(self, error: RequestError) -> None:
        while self._calls:
            self._deliver([error_output(next(iter(self._calls)), error)])

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """Hand outputs to their listeners. An output for a request that was given up is dropped.

        All responses of a step are made before the first is sent. Sending wakes the server. If making and sending took
        turns, each would find the caches full of the other's data: a token would take a third more CPU in every process
        on its way. 64 MiB of logits take 0.2 s to send, so tokens of others go before them.
        """
        told: dict[_Call, str] = {}
        for output in outputs:
            call = self._calls.get(output.request_id)
            if call is None:
                continue
            if output.error_code is not None:
                self._forget(call)
            elif output.is_final:
                del self._calls[output.request_id]
                call.open_request_ids.remove(output.request_id)
            if self._tell(call, output.request_id, partial(call.listener.on_output, output)):
                told[call] = output.request_id
            else:
                told.pop(call, None)
        for call, request_id in sorted(told.items(), key=lambda item: item[0].listener.unsent_bytes):
            self._tell(call, request_id, call.listener.flush)
            if not call.open_request_ids:
                call.claims.close()

    def _tell(self, call: _Call, request_id: str, tell: Callable[[], None]) -> bool:
        """Hand over one output. Returns whether the listener took it."""
        try:
            tell()
        except Exception as error:
            self._lose(call, request_id, error)
            return False
        return True

    def _lose(self, call: _Call, request_id: str, error: Exception) -> None:
        """End the call of a listener that raised `error`, and tell it so. Other calls go on."""
        logger.error("request %s cannot be answered", request_id, exc_info=error)
        self._forget(call)
        _tell_failure(call.listener, request_id, error)

    def _forget(self, call: _Call) -> None:
        """End a call on both sides: the engine aborts the call's requests that it still has."""
        for request_id in call.open_request_ids:
            del self._calls[request_id]
        if self._info is not None and call.open_request_ids:
            self._connection.send(Abort(list(call.open_request_ids)))
        call.open_request_ids.clear()
        call.claims.close()

    def _check_cancellations(self) -> None:
        started = time.monotonic()
        if started < self._next_cancellation_check:
            return
        for call in set(self._calls.values()):
            request_id = next(iter(call.open_request_ids))
            try:
                is_cancelled = call.listener.is_cancelled()
            except Exception as error:
                self._lose(call, request_id, error)
                continue
            if is_cancelled:
                self._deliver([error_output(request_id, Cancelled("the client cancelled the request"))])
        ended = time.monotonic()
        self._next_cancellation_check = ended + max(_CANCELLATION_INTERVAL_S, (ended - started) / _CANCELLATION_DUTY)


def _tell_failure(listener: Listener, request_id: str, error: Exception) -> None:
    """Give a request its final output. Without it the client would wait forever."""
    try:
        listener.on_output(error_output(request_id, InternalError(f"{type(error).__name__}: {error}")))
        listener.flush()
    except Exception:
        logger.exception("request %s cannot be told that it has failed", request_id)
