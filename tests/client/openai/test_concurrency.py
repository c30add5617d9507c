"""Work side by side: in order or as it comes, so much at a time, and all of it over with the first error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from multilora_client.openai.concurrency import MAX_AT_ONCE, gathered, merged


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=20))


class Counted:
    """Counts the jobs that run, and the jobs that were left before their end."""

    def __init__(self) -> None:
        self.running = self.most = self.left = 0

    async def work(self, result: Any) -> Any:
        async with aclosing(self.stream(result)) as items:
            return await anext(items)

    async def stream(self, *items: Any, error: Exception | None = None) -> AsyncGenerator[Any, None]:
        self.running += 1
        self.most = max(self.most, self.running)
        has_ended = False
        try:
            for item in items:
                await asyncio.sleep(0)
                yield item
            if error:
                raise error
            has_ended = True
        finally:
            self.running -= 1
            self.left += not has_ended

    async def endless(self) -> AsyncGenerator[int, None]:
        async with aclosing(self.stream(1)) as items:
            async for item in items:
                while True:
                    await asyncio.sleep(0)
                    yield item


def test_results_are_in_the_order_of_the_work_and_only_so_many_are_made_at_once() -> None:
    counted = Counted()
    results = run(gathered(counted.work(number) for number in range(100)))

    assert results == list(range(100))
    assert 1 < counted.most <= MAX_AT_ONCE


def test_the_first_error_ends_the_work() -> None:
    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    async def fail() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        run(gathered([wait_for_ever(), fail(), wait_for_ever()]))


async def collected(streams: list[AsyncGenerator[Any, None]], most: int = 10_000) -> list[Any]:
    items = []
    async with aclosing(merged(streams)) as merging:
        async for item in merging:
            items.append(item)
            if len(items) == most:
                break
    return items


def test_items_keep_their_streams_order_and_tell_its_number() -> None:
    counted = Counted()
    items = run(collected([counted.stream(*range(number)) for number in range(100)]))

    for number in range(100):
        assert [item for index, item in items if index == number] == list(range(number))
    assert 1 < counted.most <= MAX_AT_ONCE
    assert counted.left == 0


def test_streams_are_merged_while_they_run() -> None:
    """An endless one does not keep the others back."""
    counted = Counted()
    items = run(collected([counted.endless(), counted.endless()], most=50))
    assert {index for index, _ in items} == {0, 1}


def test_leaving_early_closes_every_stream() -> None:
    counted = Counted()
    run(collected([counted.endless() for _ in range(5)], most=20))
    assert (counted.running, counted.left) == (0, 5)


def test_the_error_of_one_stream_closes_the_others() -> None:
    counted = Counted()
    with pytest.raises(ValueError, match="broken"):
        run(collected([counted.endless(), counted.stream(1, 2, error=ValueError("broken")), counted.endless()]))
    assert (counted.running, counted.left) == (0, 3)
