"""Connections that cost their peer nothing, to the proxy: they are few for each address, and do not stay."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx2
import pytest

from deployment.local_proxy import LocalProxy

OTHER_ADDRESS = "127.0.0.2"
MAX_CONNECTIONS = 128


@pytest.fixture(scope="module")
def hasty(open_proxy: Callable[..., LocalProxy]) -> LocalProxy:
    """A proxy with the time-outs of the real one, but shorter."""
    return open_proxy(
        changes={
            "client_header_timeout 10s": "client_header_timeout 1s",
            "client_body_timeout 30s": "client_body_timeout 1s",
            "keepalive_timeout 75s": "keepalive_timeout 1s",
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
