"""`Console`: the object that every request to the console finds in `request.state`, and the dependencies made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, TypedDict

from fastapi import Depends, Request

from multilora_client.client import AsyncClient
from multilora_client.console.settings import ConsoleSettings
from multilora_client.keys import bearer_key
from multilora_client.openai.errors import Failure

MAX_UPLOADS_AT_ONCE = 2

FindClient = Callable[[str | None], AsyncClient]
"""The client that asks the server for the sender of an Authorization header. Raises Failure for one who may not."""


def with_callers_key(client: AsyncClient) -> FindClient:
    """Each caller's own key goes to the server, which decides; the console has no key that it could lend."""
    return lambda authorization: client.with_api_key(header_key(authorization))


def header_key(authorization: str | None) -> str:
    """The key of an Authorization header, whose bytes ASGI servers decode as Latin-1."""
    return bearer_key((authorization or "").encode("latin-1").decode(errors="surrogateescape"))


@dataclass(frozen=True)
class Console:
    """One running console. uploads: as many places as there may be uploads at once."""

    find_client: FindClient
    settings: ConsoleSettings
    uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UPLOADS_AT_ONCE))


class ConsoleState(TypedDict):
    console: Console


def console_of(request: Request) -> Console:
    console: Console = request.state.console
    return console


def client_of(request: Request) -> AsyncClient:
    """The client that asks for the caller. Raises Failure."""
    return console_of(request).find_client(request.headers.get("authorization"))


def writable(request: Request) -> Console:
    """Raises Failure (403) where the console is read-only."""
    console = console_of(request)
    if console.settings.is_read_only:
        raise Failure(403, "this console is read-only", "read_only")
    return console


TheConsole = Annotated[Console, Depends(console_of)]
TheClient = Annotated[AsyncClient, Depends(client_of)]
Writable = Annotated[Console, Depends(writable)]
