"""Several answers at a time: all of them together, or piece by piece as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")


class _End:
    """A mark that follows the last item."""


_END = _End()

MAX_AT_ONCE = 32
"""The most questions of one HTTP request at a time: the questions of others get their turn between them."""


async def gathered(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in the order of `work`. Raises its first error, with which all of it ends."""
    gate = asyncio.Semaphore(MAX_AT_ONCE)

    async def passed(one: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await one

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(passed(one)) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, with their stream's number. Raises the first error, which ends them all.

    No stream is more than an item ahead. To leave it early, do so under `contextlib.aclosing`: it closes the streams.
    """
    waiting = iter(enumerate(streams))
    next_items: dict[asyncio.Future[T | _End], int] = {}

    def ask(stream_index: int, stream: AsyncGenerator[T, None]) -> None:
        next_items[asyncio.ensure_future(anext(stream, _END))] = stream_index

    for index, stream in islice(waiting, MAX_AT_ONCE):
        ask(index, stream)
    try:
        while next_items:
            done, _ = await asyncio.wait(next_items, return_when=asyncio.FIRST_COMPLETED)
            for future in [future for future in next_items if future in done]:
                index, item = next_items.pop(future), future.result()
                if isinstance(item, _End):
                    for following in islice(waiting, 1):
                        ask(*following)
                else:
                    ask(index, streams[index])
                    yield index, item
    finally:
        await _close(next_items, streams)


async def _close(next_items: Collection[asyncio.Future[Any]], streams: Iterable[AsyncGenerator[Any, None]]) -> None:
    for future in next_items:
        future.cancel()
    await asyncio.gather(*next_items, return_exceptions=True)
    for stream in streams:
        await stream.aclose()
