"""`GuardedProtocol`: connections that cost their peer nothing are few for each address, and do not stay.

A connection holds a place from its first moment, long before there is a request that could show a key.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial
from ipaddress import IPv6Address
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol


def guarded_protocol(max_per_address: int, request_timeout_s: float) -> type[asyncio.Protocol]:
    """The option `http` of one uvicorn server: makes the protocol of each of its connections."""
    make = partial(
        GuardedProtocol,
        open_connections=Counter(),
        max_per_address=max_per_address,
        request_timeout_s=request_timeout_s,
    )
    # uvicorn only ever calls it, despite its annotation.
    return cast(type[asyncio.Protocol], make)


def network_of(address: str) -> str:
    """The network that an address counts as: with IPv6 its /64, since its owner has all 2^64 addresses of that."""
    with suppress(ValueError):
        parsed = IPv6Address(address)
        return str(parsed.ipv4_mapped or f"{IPv6Address(int(parsed) >> 64 << 64)}/64")
    return address


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, except that it closes connections.

    At once: a connection beyond `max_per_address` of its address. After `request_timeout_s`: a connection that has not
    sent a whole request, head and body, since it was opened or last answered. uvicorn's own keep-alive time-out is for
    connections that have sent nothing since then.

    open_connections: numbers by address; shared by all connections of a server, and changed by nothing but this class.
    """

    def __init__(
        self,
        *args: Any,
        open_connections: Counter[str],
        max_per_address: int,
        request_timeout_s: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._open_connections = open_connections
        self._max_per_address = max_per_address
        self._request_timeout_s = request_timeout_s
        self._request_timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open_connections[self._address] += 1
        if self._open_connections[self._address] > self._max_per_address:
            transport.abort()
        self._time_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_connections[self._address] -= 1
        if not self._open_connections[self._address]:
            del self._open_connections[self._address]
        self._stop_timing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time_request()

    @property
    def _address(self) -> str:
        """The network of the peer; the empty string where it has no address, as on a Unix socket."""
        return network_of(self.client[0]) if self.client else ""

    def _time_request(self) -> None:
        if not self._is_incomplete:
            self._stop_timing()
        elif self._request_timeout is None:
            self._request_timeout = self.loop.call_later(self._request_timeout_s, self.transport.abort)

    def _stop_timing(self) -> None:
        if self._request_timeout is not None:
            self._request_timeout.cancel()
            self._request_timeout = None

    @property
    def _is_incomplete(self) -> bool:
        """Whether the peer still has to send something before the server can answer."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body
