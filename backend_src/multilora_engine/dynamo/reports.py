"""`StatsReporter`: the engine's counts, for Dynamo's router and on the worker's metrics page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from itertools import groupby
from typing import Any, Protocol

from dynamo.common.backend.publisher import ComponentSnapshot

from multilora_engine.engine.engine_stats import EngineStats
from multilora_engine.lora.life_cycle import Residency
from multilora_engine.process.operations import StatsReport
from multilora_engine.serving.metrics import ENGINE_RESTARTS, Sample, samples

_INTERVAL_S = 0.5
_RANK = 0
"""The rank of a worker's one engine in its data parallel group."""

logger = logging.getLogger(__name__)


class StatsSource(Protocol):
    """The part of `EngineOperator` that is needed."""

    async def stats(self) -> StatsReport: ...


class StatsReporter:
    """Asks the engine twice a second. The page has the engine's last report, and is empty before the first one.

    model_name: the label of gauges that gateways read. num_restarts: of the engine process so far.
    on_residency: is told which adapters are in memory.
    """

    def __init__(
        self,
        operator: StatsSource,
        model_name: str,
        num_restarts: Callable[[], int],
        on_residency: Callable[[Residency], Awaitable[None]],
    ) -> None:
        self._operator = operator
        self._model_name = model_name
        self._num_restarts = num_restarts
        self._on_residency = on_residency
        self._page = ""

    @property
    def page(self) -> str:
        """The counts in the text format of Prometheus."""
        return self._page

    async def run(self, publisher: Any) -> None:
        """Report to Dynamo's `SnapshotPublisher` until cancelled."""
        while True:
            try:
                await self._report(publisher)
            except Exception as error:
                # The engine's errors, and those of Dynamo's discovery, which have no types.
                logger.warning("the worker's counts are not reported: %s", error)
            await asyncio.sleep(_INTERVAL_S)

    async def _report(self, publisher: Any) -> None:
        report = await self._operator.stats()
        publisher.publish(_RANK, snapshot(report.load.engine))
        restarts = Sample(ENGINE_RESTARTS, (), self._num_restarts())
        self._page = prometheus_page([*samples(report, self._model_name), restarts])
        await self._on_residency(report.residency)


def snapshot(stats: EngineStats) -> ComponentSnapshot:
    """The load of a worker as Dynamo's router weighs it. Blocks that are only kept for later prompts count as free."""
    num_used, queried = stats.num_blocks - stats.num_free_blocks, stats.prefix_cache.queried_tokens
    return ComponentSnapshot(
        kv_used_blocks=num_used,
        kv_total_blocks=stats.num_blocks,
        gpu_cache_usage=num_used / max(1, stats.num_blocks),
        dp_rank=_RANK,
        kv_cache_hit_rate=stats.prefix_cache.hit_tokens / queried if queried else None,
    )


def prometheus_page(latest: Iterable[Sample]) -> str:
    """Samples in the text format of Prometheus, the samples of a family together."""
    lines = []
    by_family = sorted(latest, key=lambda sample: sample.metric.name)
    for metric, family in groupby(by_family, key=lambda sample: sample.metric):
        lines.append(f"# HELP {metric.name} {metric.description}")
        lines.append(f"# TYPE {metric.name} {metric.kind.lower()}")
        for sample in family:
            labels = ",".join(f'{name}="{_escape(value)}"' for name, value in sample.labels)
            lines.append(f"{metric.name}{{{labels}}} {sample.value!r}" if labels else f"{metric.name} {sample.value!r}")
    return "".join(f"{line}\n" for line in lines)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
