"""`Workers`: calls the workers of a fleet, each by its number, through Dynamo's client."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import Any, Protocol

from multilora_engine.dynamo.fleet_messages import FromWorker, Said, ToWorker, read_worker_chunk, worker_request
from multilora_engine.errors import EngineUnavailable, RelayedError, RequestError

_ANSWER_TIMEOUT_S = 3.0
"""A worker that takes longer for a short answer is cut off from the network, or as good as dead."""

PIECE_TIMEOUT_S = 10.0
"""A worker that takes longer for a piece of pages is cut off, too."""

logger = logging.getLogger(__name__)


class WorkerGone(EngineUnavailable):
    """A worker cannot be reached, or was lost before it had answered."""


class Context(Protocol):
    """The part of Dynamo's `Context` that is needed."""

    def stop_generating(self) -> None: ...


class EndpointClient(Protocol):
    """The part of Dynamo's `Client` that is needed."""

    def instance_ids(self) -> list[int]: ...
    async def direct(self, request: Any, instance_id: int, annotated: bool, context: Context) -> Any: ...


class Workers:
    """All methods run in one event loop.

    new_context: makes the handle by which a call is ended. own_id: the calling worker, which is none of the others.
    """

    def __init__(self, client: EndpointClient, new_context: Callable[[], Context], own_id: int | None = None) -> None:
        self._client = client
        self._new_context = new_context
        self._own_id = own_id
        self._lost: set[int] = set()

    @property
    def ids(self) -> list[int]:
        """The other workers that discovery knows."""
        return [worker_id for worker_id in self._client.instance_ids() if worker_id != self._own_id]

    @property
    def reachable(self) -> list[int]:
        """Those of `ids` whose last call did not end in `WorkerGone`: discovery knows a dead worker for seconds."""
        return [worker_id for worker_id in self.ids if worker_id not in self._lost]

    def by_chance(self, but: Collection[int] = ()) -> list[int]:
        """The workers except `but`, in random order: first the reachable ones, then the others, which may be back."""
        reachable = set(self.reachable)
        left = [worker_id for worker_id in self.ids if worker_id not in but]
        return sorted(random.sample(left, len(left)), key=lambda worker_id: worker_id not in reachable)

    async def call(
        self, worker_id: int, message: ToWorker, timeout_s: float | None = None
    ) -> AsyncGenerator[FromWorker, None]:
        """The answers to a message. The call ends at the worker when its reader stops.

        timeout_s: for each answer, None for any time. Raises WorkerGone, also after some answers.
        """
        context, is_complete = self._new_context(), False
        try:
            async with asyncio.timeout(timeout_s):
                chunks = await self._client.direct(worker_request(message), worker_id, annotated=False, context=context)
            while (chunk := await _next(chunks, timeout_s)) is not None:
                if (answer := read_worker_chunk(chunk)) is not None:
                    yield answer
                is_complete = is_complete or chunk.get("finish_reason") is not None
        except Exception as error:
            # Dynamo has types for most ways to lose a worker, and raises untyped errors for the others.
            reason = str(error) or type(error).__name__
            logger.warning("worker %x is lost: %s", worker_id, reason)
            self._lost = self._lost & set(self.ids) | {worker_id}
            raise WorkerGone(f"a worker of the fleet cannot be reached: {reason}") from error
        finally:
            if not is_complete:
                context.stop_generating()
        if not is_complete:
            self._lost.add(worker_id)
            raise WorkerGone("a worker of the fleet was lost while it answered; try again")
        self._lost.discard(worker_id)

    async def ask(self, worker_id: int, message: ToWorker, timeout_s: float = _ANSWER_TIMEOUT_S) -> FromWorker:
        """The one answer to a message. Raises WorkerGone, and the RequestError that the worker answers with."""
        try:
            async with asyncio.timeout(timeout_s), aclosing(self.call(worker_id, message)) as answers:
                told = [checked(answer) async for answer in answers]
        except TimeoutError:
            raise WorkerGone(f"a worker of the fleet has not answered within {timeout_s:g} s") from None
        if len(told) != 1:
            raise WorkerGone(f"a worker of the fleet has answered {len(told)} times instead of once")
        return told[0]

    async def ask_all(
        self, message: ToWorker, but: Collection[int] = (), timeout_s: float = _ANSWER_TIMEOUT_S
    ) -> list[FromWorker | RequestError]:
        """The answers of all workers except `but`; a worker that is lost, or that refuses, answers with its error."""
        worker_ids = [worker_id for worker_id in self.ids if worker_id not in but]
        return await asyncio.gather(*(self._try(worker_id, message, timeout_s) for worker_id in worker_ids))

    async def _try(self, worker_id: int, message: ToWorker, timeout_s: float) -> FromWorker | RequestError:
        try:
            return await self.ask(worker_id, message, timeout_s)
        except RequestError as error:
            return error


async def _next(chunks: Any, timeout_s: float | None) -> Any:
    """The next chunk, None at the end. Raises TimeoutError."""
    try:
        async with asyncio.timeout(timeout_s):
            return await chunks.__anext__()
    except StopAsyncIteration:
        return None


def checked(answer: FromWorker) -> FromWorker:
    """The answer, unless it is an error. Raises RelayedError."""
    if isinstance(answer, Said) and answer.output.error_code is not None:
        raise RelayedError(answer.output.error_code, answer.output.error_message or "")
    return answer
