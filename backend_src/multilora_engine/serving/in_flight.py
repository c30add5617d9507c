"""`InFlight`: the amount of a limited means that the requests of a front hold at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

from multilora_engine.errors import Unavailable


class InFlight:
    """Amounts that are under way, by the owner that they are charged to. Any thread may begin or end one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts: Counter[str] = Counter()

    def begin(
        self, owner: str, amount: int, limit: int, too_much: Callable[[int, int], Unavailable]
    ) -> Callable[[], None]:
        """The function that gives `amount` back, to be called once.

        Raises `too_much` (of the owner's amount under way, and of the new one) when that would exceed the limit.
        """
        with self._lock:
            if self._amounts[owner] + amount > limit:
                raise too_much(self._amounts[owner], amount)
            self._amounts[owner] += amount
        return partial(self._end, owner, amount)

    def _end(self, owner: str, amount: int) -> None:
        with self._lock:
            self._amounts[owner] -= amount
            if not self._amounts[owner]:
                del self._amounts[owner]
