"""The objects that every request to the application finds in `request.state`, and the dependencies made of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, NotRequired, TypedDict

from fastapi import Depends, Request

from multilora_client.client import AsyncClient
from multilora_client.console.state import Console
from multilora_client.errors import MultiloraClientError, RateExceeded, Unauthenticated
from multilora_client.openai.catalogue import Access, Catalogue
from multilora_client.openai.connections import network_of
from multilora_client.openai.errors import Failure, quoted
from multilora_client.openai.metrics import FrontMetrics
from multilora_client.openai.settings import FrontSettings
from multilora_client.operations import ModelInfo

_FREE_S = 5.0
"""The seconds for which the server's word holds that it has no adapter of the base model's name."""

_PATIENCE_S = 5.0
"""The seconds to wait for a server that says nothing: probes give up not much later."""


@dataclass(frozen=True)
class OpenaiFront:
    """One running application. started_s: when it began, in seconds since the epoch."""

    client: AsyncClient
    catalogue: Catalogue
    settings: FrontSettings
    metrics: FrontMetrics
    started_s: int
    _clients: dict[str, AsyncClient] = field(default_factory=dict, init=False)
    _hidden: dict[str, tuple[float, asyncio.Future[list[str]]]] = field(default_factory=dict, init=False)

    def client_of(self, access: Access) -> AsyncClient:
        """The client that asks the server for a caller: with its key, if the server has keys, too.

        There is one for each key, since a client's knowledge of the server's adapters is true for its key alone.
        """
        if access.caller is None or not access.key:
            return self.client
        if access.caller.id not in self._clients:
            self._clients[access.caller.id] = self.client.with_api_key(access.key)
        return self._clients[access.caller.id]

    def name_of(self, access: Access, address: str) -> str:
        """The caller as the server is to know it: by its API key, else by the network of its address. Empty where the
        server would not take it from this front, or knows the keys itself.
        """
        secret = self.settings.client_header_secret
        if not secret or access.key:
            return ""
        return f"{secret} {network_of(address) if access.caller is None else access.caller.id}"

    async def describe_model(self, access: Access) -> ModelInfo:
        """The model of the front's server.

        Raises Failure (503) when it does not tell soon, Unauthenticated, RateExceeded.
        """
        return await _soon(self.client_of(access).describe_model())

    async def check_base(self, access: Access) -> None:
        """Raises Failure (400) where the base model's name hides an adapter of the server: a caller who names it may
        mean either. The server is asked for it by each key, at most once in some seconds while it has none.
        """
        if not access.sees_the_server:
            return
        base, who = self.catalogue.base, "" if access.caller is None else access.caller.id
        asked_s, hidden = self._hidden.get(who, (-_FREE_S, None))
        if hidden is None or time.monotonic() - asked_s > _FREE_S:
            hidden = asyncio.ensure_future(self.client_of(access).list_names([base]))
            self._hidden[who] = time.monotonic(), hidden
        try:
            names = await asyncio.shield(hidden)
        except MultiloraClientError:
            self._hidden.pop(who, None)
            raise
        if names:
            self._hidden.pop(who, None)
            raise Failure(
                400,
                f"{quoted(base)} is the name of the base model here, and of an adapter or alias of the server: start "
                "the front with another --base-model, or give the adapter another name",
                "ambiguous_model",
                "model",
            )

    async def check_server(self) -> None:
        """Raises Failure (503) if the front's server does not answer soon. A demand for a key is an answer."""
        with suppress(Unauthenticated):
            await _soon(self.client.describe_model())


class FrontState(TypedDict):
    """console: where the console is served, too."""

    front: OpenaiFront
    console: NotRequired[Console]


def front_of(request: Request) -> OpenaiFront:
    front: OpenaiFront = request.state.front
    return front


def access_of(request: Request) -> Access:
    """The access of the caller. Raises Failure (401) for a caller without a valid key."""
    return front_of(request).catalogue.access(request.headers.get("authorization"))


def operator_of(request: Request) -> Access:
    """The access of the caller. Raises Failure (401, 403) for a caller who does not run the server."""
    access = access_of(request)
    access.check_operator()
    return access


TheFront = Annotated[OpenaiFront, Depends(front_of)]
Caller = Annotated[Access, Depends(access_of)]
Operator = Annotated[Access, Depends(operator_of)]


async def _soon(description: Awaitable[ModelInfo]) -> ModelInfo:
    try:
        return await asyncio.wait_for(description, _PATIENCE_S)
    except (Unauthenticated, RateExceeded):
        raise
    except (MultiloraClientError, TimeoutError):
        raise Failure(503, "the server does not answer", "unavailable") from None
