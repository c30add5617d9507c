"""Locks by keys."""

from __future__ import annotations

import asyncio

from multilora_engine.dynamo.keyed_locks import KeyedLocks


def test_holders_of_a_key_take_turns_and_leave_nothing_behind() -> None:
    async def test() -> list[str]:
        locks: KeyedLocks[str] = KeyedLocks()
        log = []
        first_may_go = asyncio.Event()

        async def hold(name: str, key: str) -> None:
            async with locks.held(key):
                log.append(f"{name} in")
                if name == "first":
                    await first_may_go.wait()
                log.append(f"{name} out")

        tasks = [asyncio.create_task(hold(*each)) for each in (("first", "x"), ("second", "x"), ("other", "y"))]
        while "other out" not in log:
            await asyncio.sleep(0)
        assert "x" in locks
        assert "y" not in locks
        first_may_go.set()
        await asyncio.gather(*tasks)
        assert "x" not in locks
        return log

    assert asyncio.run(test()) == ["first in", "other in", "other out", "first out", "second in", "second out"]


def test_one_who_gives_up_waiting_leaves_nothing_behind() -> None:
    async def test() -> None:
        locks: KeyedLocks[str] = KeyedLocks()
        async with locks.held("x"):
            waiting = asyncio.create_task(locks.held("x").__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert "x" in locks
        assert "x" not in locks

    asyncio.run(test())
