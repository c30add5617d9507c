"""`ResidencyTaints`: tells Dynamo's routers which adapters are in a worker's memory, so that requests can prefer it.

Dynamo calls a word on a worker's card a taint; a request may prefer workers with certain taints. Dynamo's own
front computes from `max_gpu_lora_count` and the load which workers should have an adapter; the front of a fleet reads
the taints.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

from multilora_engine.lora.life_cycle import Residency

_INTERVAL_S = 1.0
"""The shortest time between two changes of a card, which every front reads."""

_WEIGHTS: Mapping[str, float] = {"gpu": 1.0, "cpu": 0.5}
"""By `Level`: how much a request prefers a worker that has its adapter there."""

Tell = Callable[[set[str]], Awaitable[None]]
"""Writes all taints of the worker on its card."""


class ResidencyTaints:
    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told: set[str] = set()
        self._told_at = 0.0

    async def report(self, residency: Residency) -> None:
        """Write these adapters on the card, unless it was written a moment ago."""
        taints = {_taint(adapter.level, adapter.name) for adapter in residency.adapters}
        if taints != self._told and time.monotonic() - self._told_at >= _INTERVAL_S:
            await self._tell(taints)
            self._told, self._told_at = taints, time.monotonic()


def preferred_taints(label: str) -> dict[str, float]:
    """The taints that a request for an adapter prefers, by their weights. label: its name, or its task id as text."""
    return {_taint(level, label): weight for level, weight in _WEIGHTS.items()}


def _taint(level: str, label: str) -> str:
    return f"lora-{level}/{label}"
