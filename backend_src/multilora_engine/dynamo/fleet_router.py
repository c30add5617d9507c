"""`FleetRouter`: Dynamo's router, as the front of a fleet asks it for a worker."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection
from typing import Any, Protocol

from multilora_engine.dynamo.workers import Workers
from multilora_engine.errors import EngineUnavailable
from multilora_engine.request import GenerationRequest

_PICK_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class KvRouter(Protocol):
    """The part of Dynamo's `KvRouter` that is needed."""

    async def best_worker(
        self,
        token_ids: list[int],
        *,
        request_id: str | None = None,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
    ) -> tuple[int, int, int]: ...
    async def mark_prefill_complete(self, request_id: str) -> None: ...
    async def free(self, request_id: str) -> None: ...


class FleetRouter:
    """Picks by the prefixes that workers have, and by their load: each request is told when it starts and when it ends.

    The router takes note of a dead worker only when discovery does, seconds later. Until then, whoever was refused by
    the router's choice is sent to another worker.
    """

    def __init__(self, router: KvRouter, workers: Workers) -> None:
        self._router = router
        self._workers = workers

    async def pick(self, request: GenerationRequest, refused_by: Collection[int]) -> int:
        """The worker for a request, none of those that have refused it. Raises EngineUnavailable."""
        if not refused_by:
            picked = await self._ask(request)
            if picked is not None:
                return picked
        left = [worker_id for worker_id in self._workers.ids if worker_id not in refused_by]
        if not left:
            raise EngineUnavailable(
                f"no worker of the fleet can be reached, {len(refused_by)} were tried; they are starting, try again"
            )
        return left[0]

    async def pick_any(self) -> int:
        """A worker that has nothing to generate yet. Raises EngineUnavailable."""
        worker_ids = self._workers.ids
        if not worker_ids:
            raise EngineUnavailable("the fleet has no worker; try again")
        return random.choice(worker_ids)

    async def begun(self, request_id: str) -> None:
        """The request has its first output."""
        await self._tell(self._router.mark_prefill_complete(request_id))

    async def ended(self, request_id: str) -> None:
        """The request takes no more of its worker."""
        await self._tell(self._router.free(request_id))

    async def _ask(self, request: GenerationRequest) -> int | None:
        name = request.lora_name or (None if request.task_id is None else str(request.task_id))
        try:
            async with asyncio.timeout(_PICK_TIMEOUT_S):
                worker_id, _, _ = await self._router.best_worker(
                    request.prompt_token_ids,
                    request_id=request.request_id,
                    lora_name=name,
                    cache_namespace=request.sender.tenant or None,
                )
        except Exception as error:
            # Dynamo's errors have no types here; without workers there is one, too.
            logger.warning("the router picks no worker: %s", error)
            return None
        return worker_id

    async def _tell(self, telling: Any) -> None:
        try:
            await telling
        except Exception as error:
            logger.debug("the router does not know of a request: %s", error)
