"""Connections to the command, by sockets of two addresses: which ones it closes, and who is served meanwhile."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection

import pytest

from multilora_client.openai.connections import network_of

ADDRESS, OTHER_ADDRESS = "127.0.0.1", "127.0.0.2"
MAX_PER_ADDRESS = 128
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"

Connect = Callable[[], socket.socket]


@contextmanager
def front(*options: str) -> Iterator[int]:
    """The command, with its port; the server behind it does not matter."""
    command = [sys.executable, "-c", "from multilora_client.cli import main; main()", "openai"]
    command += ["--url", "grpc://127.0.0.1:1", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        started = next(match for line in process.stderr if (match := re.search(r"serving http://\S+:(\d+)", line)))
        try:
            yield int(started[1])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def patient() -> Iterator[int]:
    with front() as port:
        yield port


@pytest.fixture(scope="module")
def hasty() -> Iterator[int]:
    with front("--request-timeout-secs", "0.5", "--max-connections-per-address", "3") as port:
        yield port


@pytest.fixture
def connect() -> Iterator[Callable[[int], socket.socket]]:
    with ExitStack() as stack:
        yield lambda port: stack.enter_context(socket.create_connection((ADDRESS, port), timeout=30))


def read_to_the_end(connection: socket.socket) -> bytes:
    """What the front says until it closes the connection; TimeoutError when it does not."""
    said = b""
    try:
        while data := connection.recv(4096):
            said += data
    except ConnectionResetError:
        pass
    return said


def status_for(address: str, port: int) -> int:
    connection = HTTPConnection(ADDRESS, port, timeout=30, source_address=(address, 0))
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status
    finally:
        connection.close()


def test_1100_idle_connections_of_one_address_keep_nobody_else_from_being_served(
    patient: int, connect: Callable[[int], socket.socket]
) -> None:
    idle = [connect(patient) for _ in range(1100)]
    for connection in idle[MAX_PER_ADDRESS:]:
        assert read_to_the_end(connection) == b""
    assert status_for(OTHER_ADDRESS, patient) == 200
    for connection in idle[:MAX_PER_ADDRESS]:  # which are open
        connection.sendall(MODELS)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /v1/mod",
        MODELS[:-2] + b"X-Slow: ",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
        MODELS + MODELS[:9],
        MODELS + b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "half a line", "half a head", "half a body", "one and half a line", "one and half a body"],
)
def test_a_connection_that_sends_no_whole_request_is_closed(
    hasty: int, connect: Callable[[int], socket.socket], said: bytes
) -> None:
    connection = connect(hasty)
    connection.sendall(said)
    assert read_to_the_end(connection).count(b"200 OK") == said.count(MODELS)


def test_a_place_is_free_again_when_its_connection_has_ended(
    hasty: int, connect: Callable[[int], socket.socket]
) -> None:
    held = [connect(hasty) for _ in range(3)]
    assert read_to_the_end(connect(hasty)) == b""
    for connection in held:
        read_to_the_end(connection)
    assert status_for(ADDRESS, hasty) == 200


def test_a_slow_answer_is_no_slow_request(connect: Callable[[int], socket.socket]) -> None:
    """The server behind the front accepts and says nothing."""
    with socket.create_server((ADDRESS, 0)) as silent:
        server = f"grpc://{ADDRESS}:{silent.getsockname()[1]}"
        with front("--url", server, "--request-timeout-secs", "0.1") as port:
            connection = connect(port)
            body = b'{"model": "base", "prompt": "a"}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            connection.settimeout(1.0)
            with pytest.raises(TimeoutError):
                connection.recv(1)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:ffff::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_addresses_of_one_ipv6_network_count_as_one(address: str, network: str) -> None:
    assert network_of(address) == network
