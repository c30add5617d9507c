"""`Fronts`: the engine's end of the wire to its fronts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from multilora_engine.engine_info import EngineInfo
from multilora_engine.process.messages import (
    PROTOCOL_VERSION,
    FromEngine,
    Hello,
    Outbox,
    Refused,
    Welcome,
    encode,
    output_frames,
)
from multilora_engine.request import TokenOutput

logger = logging.getLogger(__name__)


class Fronts:
    """The welcomed fronts, over one ROUTER socket. A flush sends one message to each front.

    ZeroMQ's own thread writes to the sockets. A front that does not read delays nobody: its outputs wait here, and the
    outputs of one request are joined when the front reads again.
    """

    def __init__(self, router: zmq.Socket[bytes], on_gone: Callable[[bytes], None]) -> None:
        """on_gone: called with a front whose process has ended."""
        self._router = router
        self._on_gone = on_gone
        self._welcomed: set[bytes] = set()
        self._outbox = Outbox()

    def __contains__(self, front: bytes) -> bool:
        return front in self._welcomed

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def receive(self) -> tuple[bytes, memoryview, memoryview] | None:
        """The next message: front, message, and the frame after it, which may be empty. None if there is no message."""
        try:
            front, message, *payload = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        return front.bytes, message.buffer, payload[0].buffer if payload else memoryview(b"")

    def greet(self, front: bytes, hello: Hello, info: EngineInfo) -> None:
        """Welcome a front that speaks this version of the protocol. Refuse any other front."""
        if hello.protocol_version == PROTOCOL_VERSION:
            self._welcomed.add(front)
            self.send(front, Welcome(info))
            return
        reason = (
            f"the front speaks protocol version {hello.protocol_version} and the engine {PROTOCOL_VERSION}; "
            "restart the server after an update, so that both run the same multilora_engine"
        )
        logger.error("front refused: %s", reason)
        self.send(front, Refused(reason))

    def send(self, front: bytes, message: FromEngine) -> bool:
        """Send a message that is no output. Returns False, and sends nothing, if the front reads too slowly."""
        if not self._address(front):
            return False
        self._router.send(encode(message))
        return True

    def add(self, front: bytes, output: TokenOutput) -> None:
        """Let an output wait for the next `flush` at which the front can take it."""
        self._outbox.add(front, output)

    def flush(self) -> None:
        """Send to each front the outputs that wait for it."""
        for front in self._outbox.fronts:
            if self._address(front):
                self._router.send_multipart(output_frames(self._outbox.take(front)), copy=False)

    def _address(self, front: bytes) -> bool:
        """Begin a message to a front. Returns False if the front is gone or reads too slowly."""
        try:
            self._router.send(front, zmq.SNDMORE | zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(front)
            return False
        return True

    def _drop(self, front: bytes) -> None:
        self._welcomed.discard(front)
        self._outbox.take(front)
        self._on_gone(front)
