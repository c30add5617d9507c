"""Liveness and readiness by a real inference: this server's own endpoints stay green when a model's process has died.

Over HTTP, which this server has no TLS for, and with nothing that is slow to import: containers probe often.
`grpc_probe.py` asks the same of a server without HTTP.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import NoReturn

from multilora_engine.client_header import bearer

CANARIES: Mapping[str, Mapping[str, object]] = {
    "generation_unary": {"text_input": "Hello", "request_output_len": 1},
    "ensemble": {"text_input": "Hello", "max_tokens": 1},
}
"""The question for each model; together they pass through every model that generates."""

PROBE_TIMEOUT_S = 60.0
LIVE_TIMEOUT_S = 10.0
_ENGINE_SAYS_SO = ("[UNAVAILABLE]", "[INTERNAL]")
"""It is starting again, or lost a step, as when memory ran out; it ends by itself when its steps keep failing."""

_QUEUE_IS_FULL = "[UNAVAILABLE] the queue is full"


class ProbeFailed(Exception):
    """The server is broken, and will not mend itself; the text gives the reason."""


class NotReady(Exception):
    """The server does not listen yet, or its engine is starting again or has lost a step."""


class Busy(Exception):
    """The server lives and has too much to do; the text is its error."""


def probe_generation(http_url: str, timeout_s: float = PROBE_TIMEOUT_S, api_key: str = "") -> None:
    """Get a token through `generation_unary` and one through `ensemble`. Raises ProbeFailed, NotReady or Busy.

    http_url: `host:port`. timeout_s: of each. api_key: for a server that has keys.
    """
    for model, request in CANARIES.items():
        # Triton passes no header of this interface on to a model: the key goes in the body.
        _ask(http_url, model, {**request, **bearer(api_key)}, timeout_s)


def _ask(http_url: str, model: str, request: Mapping[str, object], timeout_s: float) -> None:
    path = f"/v2/models/{model}/generate"
    try:
        _, content = _exchange(http_url, path, timeout_s, json.dumps(request))
    except TimeoutError:
        _check_live(http_url)
        raise Busy(f"{model} did not answer in {timeout_s:g} s") from None
    except (OSError, HTTPException) as error:
        raise NotReady(f"{http_url}: {error}") from None
    try:
        answer = json.loads(content)
    except ValueError:
        raise ProbeFailed(f"{http_url}{path}: the answer is no JSON; no server of multilora listens there") from None
    if not isinstance(answer, dict) or "error" in answer:
        raise_for(model, str(answer["error"] if isinstance(answer, dict) else answer))


def is_ready(http_url: str) -> bool:
    """Whether a server listens at `host:port`, and says that its models are loaded."""
    try:
        status, _ = _exchange(http_url, "/v2/health/ready", LIVE_TIMEOUT_S)
    except (OSError, HTTPException):
        return False
    return status == HTTPStatus.OK


def _exchange(http_url: str, path: str, timeout_s: float, body: str | None = None) -> tuple[int, bytes]:
    """Status and body of an answer. Raises OSError or HTTPException."""
    with contextlib.closing(HTTPConnection(http_url, timeout=timeout_s)) as connection:
        connection.sock = connect((connection.host, connection.port), timeout_s)
        connection.request("GET" if body is None else "POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()


def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """A TCP connection to a server. Raises OSError; ConnectionRefusedError where nobody listens.

    A connection to a free port of the range from which the system takes the ports of connections can get that very port
    as its own, and is then a connection to itself. It is reset, so that the port is free for the server at once.
    """
    connection = socket.create_connection(address, timeout_s)
    if connection.getsockname() == connection.getpeername():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        raise ConnectionRefusedError(f"nobody listens at {address[0]}:{address[1]}")
    return connection


def raise_for(model: str, message: str) -> NoReturn:
    """Raises NotReady, Busy or ProbeFailed for an error that the server answered with."""
    if _QUEUE_IS_FULL in message:
        raise Busy(message)
    if any(code in message for code in _ENGINE_SAYS_SO):
        raise NotReady(message)
    raise ProbeFailed(f"{model}: {message}")


def _check_live(http_url: str) -> None:
    """Tells a busy server, which answers this at once, from one that hangs. Raises ProbeFailed."""
    try:
        _exchange(http_url, "/v2/health/live", LIVE_TIMEOUT_S)
    except (OSError, HTTPException) as error:
        raise ProbeFailed(f"the server hangs: {error}") from None
