"""`FleetConnection`: a front's way to the workers, through one runtime of Dynamo after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from multilora_engine.dynamo.fleet_router import KvRouter
from multilora_engine.dynamo.workers import Context, EndpointClient

_PATIENCE_S = 10.0
"""How long no worker is there before a new runtime looks for some, and how long after a runtime that could not begin.

Nothing is lost with the earlier one then: it knows no worker, and so no prefixes of any."""

_MOST_PATIENCE_S = 320.0
"""Each runtime that begins, and finds no worker, doubles the time to the next: an earlier one leaves two threads."""

_LOOKS_PER_PATIENCE = 10

_OPEN_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """A runtime, its client and its router. close: ends the runtime, and the calls that run through it."""

    client: EndpointClient
    router: KvRouter
    close: Callable[[], None]


class FleetConnection:
    """The `Client` and the `KvRouter` of the latest runtime.

    A runtime that discovery was away from for longer than its lease has ended, for good: it knows no worker any more,
    does not learn of those that come back, and says nothing of it to Python. So a runtime that knows no worker for a
    while gets a successor, in the same process, because this one keeps what clients have sent. All methods run in one
    event loop.
    """

    def __init__(
        self,
        first: Link,
        open_link: Callable[[], Awaitable[Link]],
        longest_call_s: float,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """longest_call_s: an earlier runtime lives for so long after its successor began, because calls that run
        through it may still get answers.
        """
        self._link = first
        self._open_link = open_link
        self._longest_call_s = longest_call_s
        self._patience_s = patience_s
        self._earlier: list[Link] = []

    def instance_ids(self) -> list[int]:
        return self._link.client.instance_ids()

    async def direct(self, request: Any, instance_id: int, annotated: bool, context: Context) -> Any:
        return await self._link.client.direct(request, instance_id, annotated, context)

    async def best_worker(self, token_ids: list[int], **options: Any) -> tuple[int, int, int]:
        return await self._link.router.best_worker(token_ids, **options)

    async def mark_prefill_complete(self, request_id: str) -> None:
        await self._link.router.mark_prefill_complete(request_id)

    async def free(self, request_id: str) -> None:
        await self._link.router.free(request_id)

    async def keep(self) -> None:
        """Look for workers again and again; a runtime that knows none for a while gets a successor."""
        loop = asyncio.get_running_loop()
        patience_s, since = self._patience_s, loop.time()
        while True:
            await asyncio.sleep(self._patience_s / _LOOKS_PER_PATIENCE)
            if self.instance_ids():
                patience_s, since = self._patience_s, loop.time()
            elif loop.time() - since >= patience_s:
                began = await self._renew()
                patience_s = min(2 * patience_s, _MOST_PATIENCE_S) if began else self._patience_s
                since = loop.time()

    def close(self) -> None:
        """End all runtimes."""
        for link in (*self._earlier, self._link):
            link.close()
        self._earlier.clear()

    async def _renew(self) -> bool:
        """Begin a new runtime. Returns whether there is one: discovery may be away."""
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                link = await self._open_link()
        except Exception as error:
            # Dynamo's errors have no types here.
            logger.warning("no worker is there, and discovery cannot be asked again: %s", error)
            return False
        logger.warning("no worker is there: discovery is asked again, through a new connection")
        earlier, self._link = self._link, link
        self._earlier.append(earlier)
        asyncio.get_running_loop().call_later(self._longest_call_s, self._close_earlier, earlier)
        return True

    def _close_earlier(self, link: Link) -> None:
        if link in self._earlier:
            self._earlier.remove(link)
            link.close()
