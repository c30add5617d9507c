"""A front's way to its workers, over runtimes of a few lines: one that discovery has forgotten knows no worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.virtual_time import run_in_virtual_time

from multilora_engine.dynamo.fleet_connection import FleetConnection, Link

PATIENCE_S = 10.0
LONGEST_CALL_S = 30.0


class FakeRuntime:
    """Its client and its router answer with its number; it knows one worker, or none."""

    def __init__(self, number: int, has_worker: bool) -> None:
        self.number = number
        self.has_worker = has_worker
        self.is_closed = False
        self.freed: list[str] = []

    def close(self) -> None:
        self.is_closed = True

    def instance_ids(self) -> list[int]:
        return [self.number] if self.has_worker else []

    async def direct(self, request: Any, instance_id: int, annotated: bool, context: Any) -> Any:
        return (self.number, request, instance_id, annotated, context)

    async def best_worker(self, token_ids: list[int], **options: Any) -> tuple[int, int, int]:
        return self.number, len(token_ids), options["overlap"]

    async def mark_prefill_complete(self, request_id: str) -> None:
        self.freed.append(f"begun {request_id}")

    async def free(self, request_id: str) -> None:
        self.freed.append(request_id)


class Discovery:
    """Opens runtimes, from the second one on. is_away: it opens none; has_workers: of the runtimes that it opens."""

    def __init__(self) -> None:
        self.runtimes = [FakeRuntime(1, has_worker=True)]
        self.num_tries = 0
        self.is_away = False
        self.has_workers = True

    def link(self) -> Link:
        runtime = self.runtimes[-1]
        return Link(runtime, runtime, runtime.close)

    async def open(self) -> Link:
        self.num_tries += 1
        if self.is_away:
            raise RuntimeError("etcd startup connection timed out")
        self.runtimes.append(FakeRuntime(len(self.runtimes) + 1, self.has_workers))
        return self.link()


@pytest.fixture
def discovery() -> Discovery:
    return Discovery()


def in_a_loop(test: Callable[[Discovery], Coroutine[Any, Any, None]]) -> Callable[[Discovery], None]:
    def run(discovery: Discovery) -> None:
        run_in_virtual_time(test(discovery))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@asynccontextmanager
async def kept(discovery: Discovery) -> AsyncIterator[FleetConnection]:
    connection = FleetConnection(discovery.link(), discovery.open, LONGEST_CALL_S, PATIENCE_S)
    keeping = asyncio.create_task(connection.keep())
    try:
        yield connection
    finally:
        assert not keeping.done()
        keeping.cancel()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(100 * PATIENCE_S):
        while not is_so():
            await asyncio.sleep(PATIENCE_S / 20)


@in_a_loop
async def test_a_connection_with_workers_keeps_its_runtime_and_asks_it(discovery: Discovery) -> None:
    async with kept(discovery) as connection:
        await asyncio.sleep(5 * PATIENCE_S)
        assert connection.instance_ids() == [1]
        assert await connection.direct("a", 7, False, "c") == (1, "a", 7, False, "c")
        assert await connection.best_worker([1, 2], overlap=5) == (1, 2, 5)
        await connection.mark_prefill_complete("r")
        await connection.free("r")
    assert discovery.runtimes[0].freed == ["begun r", "r"]
    assert discovery.num_tries == 0


@in_a_loop
async def test_a_runtime_that_knows_no_worker_any_more_gets_a_successor(discovery: Discovery) -> None:
    async with kept(discovery) as connection:
        discovery.runtimes[0].has_worker = False
        await until(lambda: connection.instance_ids() == [2])
        assert (await connection.direct("a", 2, False, None))[0] == 2
        assert (await connection.best_worker([1], overlap=0))[0] == 2
        await connection.free("r")
        assert discovery.runtimes[1].freed == ["r"]
        await asyncio.sleep(3 * PATIENCE_S)
        assert discovery.num_tries == 1


@in_a_loop
async def test_a_runtime_whose_worker_is_back_soon_stays(discovery: Discovery) -> None:
    async with kept(discovery) as connection:
        for _ in range(4):
            discovery.runtimes[0].has_worker = False
            await asyncio.sleep(PATIENCE_S / 3)
            discovery.runtimes[0].has_worker = True
            await asyncio.sleep(PATIENCE_S / 3)
        assert connection.instance_ids() == [1]
        assert discovery.num_tries == 0


@in_a_loop
async def test_calls_through_the_earlier_runtime_may_end_before_it_does(discovery: Discovery) -> None:
    async with kept(discovery) as connection:
        discovery.runtimes[0].has_worker = False
        await until(lambda: connection.instance_ids() == [2])
        assert not discovery.runtimes[0].is_closed
        await until(lambda: discovery.runtimes[0].is_closed)
        assert not discovery.runtimes[1].is_closed


@in_a_loop
async def test_discovery_that_is_away_is_asked_until_it_is_back(discovery: Discovery) -> None:
    async with kept(discovery) as connection:
        discovery.is_away, discovery.runtimes[0].has_worker = True, False
        await until(lambda: discovery.num_tries == 4)
        assert not discovery.runtimes[0].is_closed
        discovery.is_away = False
        await until(lambda: connection.instance_ids() == [2])


@in_a_loop
async def test_a_fleet_without_workers_gets_new_runtimes_more_and_more_seldom(discovery: Discovery) -> None:
    discovery.has_workers, discovery.runtimes[0].has_worker = False, False
    async with kept(discovery):
        times = []
        for number in range(1, 4):
            await until(lambda number=number: discovery.num_tries == number)  # type: ignore[misc]
            times.append(asyncio.get_running_loop().time())
    assert times[1] - times[0] >= 1.8 * PATIENCE_S
    assert times[2] - times[1] >= 3.6 * PATIENCE_S


@in_a_loop
async def test_a_worker_that_comes_to_a_new_runtime_is_found_by_it(discovery: Discovery) -> None:
    discovery.has_workers, discovery.runtimes[0].has_worker = False, False
    async with kept(discovery) as connection:
        await until(lambda: discovery.num_tries == 1)
        discovery.runtimes[1].has_worker = True
        assert connection.instance_ids() == [2]


@in_a_loop
async def test_the_end_closes_every_runtime(discovery: Discovery) -> None:
    async with kept(discovery) as connection:
        discovery.runtimes[0].has_worker = False
        await until(lambda: connection.instance_ids() == [2])
        connection.close()
        assert [runtime.is_closed for runtime in discovery.runtimes] == [True, True]
