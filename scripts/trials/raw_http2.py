"""The part of HTTP/2 (RFC 9113) that a client needs to send frames beyond every limit."""

from __future__ import annotations

import socket
from collections.abc import Iterator

HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 1, 3, 4, 6, 9
"""Kinds of frames."""

ACK, END_HEADERS = 1, 4
"""Flags."""

MAX_CONCURRENT_STREAMS = 3
"""A setting."""

REFUSED_STREAM = 7
"""A reason."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PATH = b"/inference.GRPCInferenceService/ModelStreamInfer"

# Headers without an index, their names by the static table's index where it has them (RFC 7541).
_HEAD = b"".join(
    (
        b"\x83\x86",  # POST, http
        b"\x04" + bytes([len(_PATH)]) + _PATH,
        b"\x01\x01x",  # the authority
        b"\x0f\x10\x10application/grpc",
        b"\x00\x02te\x08trailers",
    )
)


def greet(connection: socket.socket) -> None:
    """Send the first bytes of a client, and acknowledge the server's settings ahead of time."""
    connection.sendall(_PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))


def open_streams(connection: socket.socket, number: int) -> list[int]:
    """Open streams without a request. Returns their numbers."""
    streams = list(range(1, 2 * number, 2))
    connection.sendall(b"".join(frame(HEADERS, END_HEADERS, stream, _HEAD) for stream in streams))
    return streams


def opened_and_reset(first: int, number: int) -> bytes:
    """Frames that open streams without a request from the number `first` on, and end each at once."""
    streams = range(first, first + 2 * number, 2)
    cancel = (8).to_bytes(4, "big")
    return b"".join(frame(HEADERS, END_HEADERS, each, _HEAD) + frame(RST_STREAM, 0, each, cancel) for each in streams)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def frames(connection: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """The kind, stream and payload of each frame that comes, until the connection is closed. Raises TimeoutError."""
    while len(head := connection.recv(9, socket.MSG_WAITALL)) == 9:
        size = int.from_bytes(head[:3], "big")
        yield head[3], int.from_bytes(head[5:], "big"), connection.recv(size, socket.MSG_WAITALL) if size else b""
