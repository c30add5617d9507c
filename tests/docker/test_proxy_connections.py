"""Connections that cost their peer nothing, to the proxy: they are few for each address, and do not stay."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import grpc
import httpx2
import pytest

from servers.local_proxy import LocalProxy
from trials.raw_http2 import MAX_CONCURRENT_STREAMS, REFUSED_STREAM, RST_STREAM, SETTINGS, frames, greet, open_streams

OTHER_ADDRESS = "127.0.0.2"
MAX_CONNECTIONS = 128
MAX_STREAMS = 128
LIVE = "GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"


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
    answer = read_to_the_end(connection)
    assert answer.startswith(b"HTTP/1.1 200") if said.endswith(b"\r\n\r\n") else answer == b""


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (LIVE + f"X: {'a' * 8000}\r\n", 200),
        (LIVE + f"X: {'a' * 8300}\r\n", 400),
        (LIVE + "".join(f"X{number}: {'a' * 7000}\r\n" for number in range(4)), 200),
        (LIVE + "".join(f"X{number}: {'a' * 7000}\r\n" for number in range(5)), 400),
        (LIVE.replace("live", f"live?{'a' * 8300}"), 414),
    ],
    ids=["a header below", "a header above", "all below", "all above", "a path above"],
)
def test_an_http_head_has_lines_of_8_kib_and_32_kib_in_all(
    proxy: LocalProxy, connect: Callable[[str], socket.socket], said: str, status: int
) -> None:
    connection = connect(proxy.http_url)
    connection.sendall(f"{said}Connection: close\r\n\r\n".encode())
    assert read_to_the_end(connection).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("num_headers", "size", "code"),
    [
        (1, 8000, grpc.StatusCode.UNIMPLEMENTED),
        (1, 8300, grpc.StatusCode.UNAVAILABLE),
        (4, 7000, grpc.StatusCode.UNIMPLEMENTED),
        (6, 7000, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_a_grpc_head_has_the_same_bounds(proxy: LocalProxy, num_headers: int, size: int, code: grpc.StatusCode) -> None:
    """Names that gRPC's compression does not shorten; a method that the proxy does not know tells that it read them."""
    metadata = [(f"x{number}", "X" * size) for number in range(num_headers)]
    with grpc.insecure_channel(proxy.grpc_url) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/inference.GRPCInferenceService/Nothing")(b"", metadata=metadata, timeout=30)
    assert raised.value.code() == code


def test_a_grpc_call_that_pauses_within_its_message_ends_as_internal(hasty: LocalProxy) -> None:
    is_over = threading.Event()

    def messages() -> Iterator[bytes]:
        is_over.wait(30)
        yield b""

    with ExitStack() as resources:
        resources.callback(is_over.set)
        channel = resources.enter_context(grpc.insecure_channel(hasty.grpc_url))
        answers = channel.stream_stream("/inference.GRPCInferenceService/ModelInfer")(messages(), timeout=30)
        with pytest.raises(grpc.RpcError) as raised:
            next(answers)
    assert raised.value.code() == grpc.StatusCode.INTERNAL


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


def test_a_grpc_connection_has_so_many_streams_at_once(
    proxy: LocalProxy, connect: Callable[[str], socket.socket]
) -> None:
    connection = connect(proxy.grpc_url)
    greet(connection)
    said = frames(connection)
    settings = dict(struct.iter_unpack(">HI", next(payload for kind, _, payload in said if kind == SETTINGS)))
    assert settings[MAX_CONCURRENT_STREAMS] == MAX_STREAMS
    streams = open_streams(connection, MAX_STREAMS + 3)
    refused = (stream for kind, stream, payload in said if (kind, payload) == (RST_STREAM, REFUSED_STREAM.to_bytes(4)))
    assert [next(refused) for _ in range(3)] == streams[MAX_STREAMS:]


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
