"""`Connection`: talks to one engine process. When that dies the connection is lost, and a new one is made."""

from __future__ import annotations

from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from multilora_engine.process.messages import (
    PROTOCOL_VERSION,
    FromEngine,
    Hello,
    ToEngine,
    decode_from_engine,
    encode,
)
from multilora_engine.process.outbox import MAX_QUEUED_MESSAGES

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_RECONNECT_INTERVAL_MS = 50


class Connection:
    """A socket of a front, with the monitor that notices the death of the peer. Used by one thread.

    Until there is an engine, it waits for one. ZeroMQ would also reconnect the same socket to the next engine, and
    deliver the messages meant for the dead one; so a lost connection is closed, with all its messages.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket_path: Path) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        # Not without limit: an engine that is told joins the outputs that a front that is behind has not read.
        self._socket.set(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_INTERVAL_MS)
        self._monitor = self._socket.get_monitor_socket(_LOST)
        self._socket.connect(f"ipc://{socket_path}")
        self.send(Hello(PROTOCOL_VERSION))

    @property
    def pollable(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Readable when there is a message, or when the connection may be lost."""
        return self._socket, self._monitor

    def send(self, message: ToEngine, payload: memoryview | None = None) -> None:
        frames: list[bytes | memoryview] = [encode(message)]
        if payload is not None:
            frames.append(payload)
        self._socket.send_multipart(frames, copy=False)

    def receive(self) -> list[FromEngine]:
        """Everything that has arrived; does not wait."""
        messages: list[FromEngine] = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return messages
            messages.append(decode_from_engine(*(frame.buffer for frame in frames)))

    def is_lost(self) -> bool:
        """Whether the peer has gone; does not wait."""
        lost = False
        while self._monitor.poll(0):
            lost = bool(recv_monitor_message(self._monitor)["event"] & _LOST) or lost
        return lost

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
