"""`StatsReporter`: the engine's counts, for Dynamo's router and on the worker's metrics page.

`BlockPublisher` tells the router which prefixes the worker has, so that prompts that share them come here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from dynamo.common.backend.publisher import ComponentSnapshot

from multilora_engine.engine.block_events import BlockEvent, BlockRemoved, BlockStored
from multilora_engine.engine.engine_stats import EngineStats
from multilora_engine.lora.life_cycle import Residency
from multilora_engine.process.operations import StatsReport
from multilora_engine.serving.metrics import ENGINE_RESTARTS, Sample, samples

_HASH_BYTES = 8


class EventPublisher(Protocol):
    """The part of Dynamo's `KvEventPublisher` that is needed."""

    def publish_batch(self, events: Sequence[Mapping[str, Any]]) -> None: ...


class BlockPublisher:
    """The listener of the engine's blocks. Only the client's thread calls it, but for `start`, which comes first.

    Dynamo computes the hash that it routes by from published values: tokens, name of the adapter, salt. That hash
    knows no versions: when a name has moved to other weights, the first block of the later weights takes back the
    blocks of the earlier weights. Blocks after an unpublished block are left out: the router cannot place them.
    """

    def __init__(self) -> None:
        self._publisher: EventPublisher | None = None
        self._published: dict[int, str] = {}
        self._hashes_of_name: defaultdict[str, set[int]] = defaultdict(set)
        self._digests: dict[str, str] = {}

    def start(self, publisher: EventPublisher) -> None:
        """Publish from now on; earlier events are dropped."""
        self._publisher = publisher

    def on_events(self, events: list[BlockEvent]) -> None:
        if self._publisher is None:
            return
        batch: list[Mapping[str, Any]] = []
        for event in events:
            match event:
                case BlockStored():
                    batch += self._stored(event)
                case BlockRemoved(key):
                    batch += self._removed([block_hash(key)])
        self._publish(batch)

    def on_loss(self) -> None:
        self._publish(self._removed(list(self._published)))

    def _stored(self, event: BlockStored) -> list[Mapping[str, Any]]:
        number, name = block_hash(event.key), event.lora_name
        parent = block_hash(event.parent_key) if event.parent_key else None
        has_moved = self._digests.get(name, event.digest) != event.digest
        moved = self._removed(list(self._hashes_of_name[name])) if has_moved else []
        if parent is not None and parent not in self._published:
            return moved
        self._digests[name] = event.digest
        self._published[number] = name
        self._hashes_of_name[name].add(number)
        stored = {
            "type": "stored",
            "token_ids": event.token_ids,
            "num_block_tokens": [len(event.token_ids)],
            "block_hashes": [number],
            "parent_hash": parent,
            "lora_name": name or None,
            "cache_salt": event.tenant or None,
        }
        return [*moved, stored]

    def _removed(self, hashes: list[int]) -> list[Mapping[str, Any]]:
        """Forget the published blocks among `hashes`. Returns the event that says so."""
        known = [number for number in hashes if number in self._published]
        for number in known:
            name = self._published.pop(number)
            self._hashes_of_name[name].discard(number)
            if not self._hashes_of_name[name]:
                # Clients choose the names: one without blocks takes no memory.
                del self._hashes_of_name[name], self._digests[name]
        return [{"type": "removed", "block_hashes": known}] if known else []

    def _publish(self, batch: list[Mapping[str, Any]]) -> None:
        if batch and self._publisher is not None:
            self._publisher.publish_batch(batch)


def block_hash(key: bytes) -> int:
    """The number by which Dynamo knows a block, 64 bits with a sign. key: of our prefix cache, a SHA-256."""
    return int.from_bytes(key[:_HASH_BYTES], "little", signed=True)


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
