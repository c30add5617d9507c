"""The application of `multilora console`: the page by itself, before one server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from multilora_client.client import AsyncClient
from multilora_client.console.page import console_routes
from multilora_client.console.settings import ConsoleSettings
from multilora_client.console.state import Console, ConsoleState, with_callers_key


def make_app(connect: Callable[[], AsyncClient], settings: ConsoleSettings) -> Starlette:
    """The application. `connect` makes the client, which has no key of its own, in the event loop that uses it."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[ConsoleState]:
        async with connect() as client:
            yield {"console": Console(with_callers_key(client), settings)}

    return Starlette(routes=console_routes(settings), lifespan=lifespan)
