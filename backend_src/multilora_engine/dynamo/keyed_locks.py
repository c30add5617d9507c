"""`KeyedLocks`: a lock for each key, as long as a coroutine holds it or waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class KeyedLocks(Generic[Key]):
    """Clients choose the keys, and their number has no bound: a lock that no coroutine needs takes no memory."""

    def __init__(self) -> None:
        self._locks: dict[Key, asyncio.Lock] = {}
        self._num_users: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        """Whether a coroutine holds the lock of a key, or waits for it."""
        return key in self._locks

    @asynccontextmanager
    async def held(self, key: Key) -> AsyncIterator[None]:
        """Hold the lock of a key while the block runs; callers get it in the order in which they ask."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._num_users[key] = self._num_users.get(key, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._locks[key], self._num_users[key]
