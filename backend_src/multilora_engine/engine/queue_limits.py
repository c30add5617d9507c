"""`QueueLimits`: how many requests may wait, of all clients and of one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from multilora_engine.engine.live_requests import LiveRequests
from multilora_engine.errors import QueueFull, QueueShareFull


@dataclass(frozen=True)
class QueueLimits:
    """max_waiting: requests that wait. A client with a name may have half as many, waiting and running."""

    max_waiting: int

    @property
    def max_of_client(self) -> int:
        return max(1, self.max_waiting // 2)

    def check(self, client: str, num_waiting: int, live: LiveRequests) -> None:
        """Raises QueueFull or QueueShareFull when a further request of a client may not wait."""
        if num_waiting >= self.max_waiting:
            wait_s = (time.monotonic_ns() - live.oldest_waiting().times.arrival_ns) / 1e9
            raise QueueFull(num_waiting, self.max_waiting, wait_s)
        if client and (num_own := live.num_of(client)) >= self.max_of_client:
            raise QueueShareFull(num_own, self.max_of_client)
