"""`FleetRouter`: Dynamo's router, as the front of a fleet asks it for a worker."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from multilora_engine.dynamo.residency_taints import preferred_taints
from multilora_engine.dynamo.workers import Workers
from multilora_engine.errors import EngineUnavailable
from multilora_engine.lora.names import label_of
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
        routing_constraints: Any = None,
        cache_namespace: str | None = None,
    ) -> tuple[int, int, int]: ...
    async def mark_prefill_complete(self, request_id: str) -> None: ...
    async def free(self, request_id: str) -> None: ...


class FleetRouter:
    """Picks a worker by its cached prefixes, the adapters in its memory, and its load: the router is told when a
    request starts and when it ends.

    The router notices a dead worker only when discovery does, seconds later. Until then, a request that the router's
    choice has refused goes to another worker.
    """

    def __init__(self, router: KvRouter, workers: Workers, prefer: Callable[[Mapping[str, float]], Any]) -> None:
        """prefer: makes Dynamo's `RoutingConstraints` of the preferred taints."""
        self._router = router
        self._workers = workers
        self._prefer = prefer

    async def pick(self, request: GenerationRequest, refused_by: Collection[int]) -> int:
        """The worker for a request, none of the workers that have refused it. Raises EngineUnavailable."""
        if not refused_by:
            picked = await self._ask(request)
            if picked is not None:
                return picked
        left = self._workers.by_chance(but=refused_by)
        if not left:
            raise EngineUnavailable(
                f"no worker of the fleet can be reached, {len(refused_by)} were tried; they are starting, try again"
            )
        # By chance: while a worker is dead and discovery does not know it, one other would get all of its requests.
        return left[0]

    async def pick_any(self) -> int:
        """A worker for a call that generates nothing. Raises EngineUnavailable."""
        worker_ids = self._workers.ids
        if not worker_ids:
            raise EngineUnavailable("the fleet has no worker; try again")
        return random.choice(worker_ids)

    async def begun(self, request_id: str) -> None:
        """The request has its first output."""
        await self._tell(self._router.mark_prefill_complete(request_id))

    async def ended(self, request_id: str) -> None:
        """The request needs its worker no more."""
        await self._tell(self._router.free(request_id))

    async def _ask(self, request: GenerationRequest) -> int | None:
        name = request.lora_name or (None if request.task_id is None else str(request.task_id))
        wanted = None if request.task_id is None else label_of(request.task_id, request.lora_name)
        try:
            async with asyncio.timeout(_PICK_TIMEOUT_S):
                worker_id, _, _ = await self._router.best_worker(
                    request.prompt_token_ids,
                    request_id=request.request_id,
                    lora_name=name,
                    routing_constraints=None if wanted is None else self._prefer(preferred_taints(wanted)),
                    cache_namespace=request.sender.tenant or None,
                )
        except Exception as error:
            # Dynamo's errors have no types here; it raises one also if there are no workers.
            logger.warning("the router picks no worker: %s", error)
            return None
        return worker_id

    async def _tell(self, telling: Any) -> None:
        try:
            await telling
        except Exception as error:
            logger.debug("the router does not know of a request: %s", error)
