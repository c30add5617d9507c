"""Connections that cost their peer nothing, to the proxy: they are few for each address, and do not stay."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx2
import pytest

from servers.local_proxy import LocalProxy

OTHER_ADDRESS = "127.0.0.2"
MAX_CONNECTIONS = 128
MAX_STREAMS = 128
LIVE = "GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"

# Of HTTP/2 (RFC 9113): kinds of frames, a flag, a setting, a reason.
HEADERS, RST_STREAM, SETTINGS = 1, 3, 4
END_HEADERS = 4
MAX_CONCURRENT_STREAMS = 3
REFUSED_STREAM = 7


@pytest.fixture(scope="module")
def hasty(open_proxy: Callable[..., LocalProxy]) -> LocalProxy:
    """A proxy with the time-outs of the real one, but shorter."""
    return open_proxy(
        changes={
            "client_header_timeout 10s": "client_header_timeout 1s",
            "client_body_timeout 30s": "client_body_timeout 1s",
            "keepalive_timeout 75s": "keepalive_timeout 1s",
            "send_timeout 60s": "send_timeout 1s",
            "limit_conn requests 512": "limit_conn requests 1",
        }
    )


@pytest.fixture
def connect() -> Iterator[Callable[[str], socket.socket]]:
    """Connects to `host:port` from an address of its own."""
    with ExitStack() as stack:

        def connect(url: str) -> socket.socket:
            host, port = url.split(":")
            connection = socket.create_connection((host, int(port)), timeout=30, source_address=(OTHER_ADDRESS, 0))
            return stack.enter_context(connection)

        yield connect


@pytest.fixture(scope="module")
def behind_another(open_proxy: Callable[..., LocalProxy]) -> LocalProxy:
    """A proxy that is told by another one before it who its peers are, as behind a load balancer."""
    believe = "set_real_ip_from 127.0.0.0/8; include listen.conf;"
    return open_proxy(changes={"listen 8080;": "listen 8080 proxy_protocol;", "include listen.conf;": believe})


def is_answered(proxy: LocalProxy) -> bool:
    return httpx2.get(f"http://{proxy.http_url}/v2/health/live", timeout=30).status_code == 200


def read_to_the_end(connection: socket.socket) -> bytes:
    """What the proxy says until it closes the connection; TimeoutError when it does not."""
    said = b""
    while True:
        try:
            data = connection.recv(4096)
        except ConnectionResetError:
            return said
        if not data:
            return said
        said += data


def test_an_address_has_so_many_connections_and_others_are_served(
    proxy: LocalProxy, connect: Callable[[str], socket.socket]
) -> None:
    idle = [connect(proxy.http_url) for _ in range(1100)]
    closed = idle[MAX_CONNECTIONS:]
    assert [read_to_the_end(connection) for connection in closed] == [b""] * len(closed)
    assert is_answered(proxy)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /v2/health/live HT",
        b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"POST /v2/models/generation_unary/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
        b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["nothing", "half a line", "half a head", "half a body", "one request"],
)
def test_an_http_connection_without_a_whole_request_is_closed(
    hasty: LocalProxy, connect: Callable[[str], socket.socket], said: bytes
) -> None:
    connection = connect(hasty.http_url)
    connection.sendall(said)
    assert read_to_the_end(connection).startswith(b"HTTP/1.1 200") == said.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "said",
    [b"", b"PRI * HTTP/2.0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)],
    ids=["nothing", "half a preface", "a connection without calls"],
)
def test_a_grpc_connection_without_a_call_is_closed(
    hasty: LocalProxy, connect: Callable[[str], socket.socket], said: bytes
) -> None:
    connection = connect(hasty.grpc_url)
    connection.sendall(said)
    read_to_the_end(connection)


def settings_of(connection: socket.socket) -> dict[int, int]:
    """What an HTTP/2 server says of itself first: values by their numbers (RFC 9113, 6.5)."""
    head = connection.recv(9, socket.MSG_WAITALL)
    assert head[3] == SETTINGS
    payload = connection.recv(int.from_bytes(head[:3], "big"), socket.MSG_WAITALL)
    return dict(struct.iter_unpack(">HI", payload))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def refused_streams(connection: socket.socket) -> Iterator[int]:
    """The streams that the server refuses, as it does."""
    while head := connection.recv(9, socket.MSG_WAITALL):
        payload = connection.recv(int.from_bytes(head[:3], "big"), socket.MSG_WAITALL)
        if head[3] == RST_STREAM and int.from_bytes(payload, "big") == REFUSED_STREAM:
            yield int.from_bytes(head[5:], "big")


def test_a_grpc_connection_has_so_many_streams_at_once(
    proxy: LocalProxy, connect: Callable[[str], socket.socket]
) -> None:
    connection = connect(proxy.grpc_url)
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b""))
    assert settings_of(connection)[MAX_CONCURRENT_STREAMS] == MAX_STREAMS
    # Of the static table: POST, http. Then a path in plain letters (RFC 7541, 6.2.2).
    path = b"/inference.GRPCInferenceService/ModelStreamInfer"
    head = b"\x83\x86\x04" + bytes([len(path)]) + path + b"\x01\x01x"
    streams = range(1, 2 * MAX_STREAMS + 6, 2)
    connection.sendall(b"".join(frame(HEADERS, END_HEADERS, stream, head) for stream in streams))
    refused = refused_streams(connection)
    assert [next(refused) for _ in range(3)] == list(streams[MAX_STREAMS:])


def test_a_peer_that_reads_nothing_holds_no_request_for_long(
    hasty: LocalProxy, connect: Callable[[str], socket.socket]
) -> None:
    """Seen by the bound on requests at once, which is one here."""
    body = b'{"text_input": "a", "max_tokens": 300000}'  # an answer of 40 MB, more than sockets hold
    deaf = connect(hasty.http_url)
    deaf.sendall(b"POST /v2/models/generation_unary/generate HTTP/1.1\r\nHost: x\r\n")
    deaf.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    assert deaf.recv(1) == b"H"
    transport = httpx2.HTTPTransport(local_address=OTHER_ADDRESS)
    with httpx2.Client(transport=transport, base_url=f"http://{hasty.http_url}", timeout=30) as same_peer:

        def statuses() -> Iterator[int]:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                yield same_peer.get("/v2/health/live").status_code

        assert next(statuses()) == 429
        assert 200 in statuses()


@pytest.mark.parametrize(
    ("address", "is_closed"), [("2001:db8:1:2:ffff::9", True), ("2001:db8:1:3::1", False), ("192.0.2.7", False)]
)
def test_addresses_of_one_ipv6_network_count_as_one_peer(
    behind_another: LocalProxy, connect: Callable[[str], socket.socket], address: str, is_closed: bool
) -> None:
    def connect_from(address: str, is_open: bool) -> socket.socket:
        connection = connect(behind_another.http_url)
        family, local = ("TCP6", "::1") if ":" in address else ("TCP4", "127.0.0.1")
        more = "" if is_open else "Connection: close\r\n"
        connection.sendall(f"PROXY {family} {address} {local} 1 2\r\n{LIVE}{more}\r\n".encode())
        return connection

    first = [connect_from(f"2001:db8:1:2::{i:x}", is_open=True) for i in range(MAX_CONNECTIONS)]
    assert all(connection.recv(12) == b"HTTP/1.1 200" for connection in first)
    assert (read_to_the_end(connect_from(address, is_open=False)) == b"") == is_closed
