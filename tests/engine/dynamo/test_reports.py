"""What a worker counts, as Prometheus and Dynamo's router read it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats, PrefixCacheStats
from multilora_engine.lora.life_cycle import LoRAStats, Residency, TierStats
from multilora_engine.process.operations import LoadReport, StatsReport
from multilora_engine.process.telemetry import RequestStats, Usage
from multilora_engine.serving.metrics import MetricName, Sample

reports = pytest.importorskip("multilora_engine.dynamo.reports", reason="ai-dynamo is not installed")

BYTES = MetricName("m_bytes", "GAUGE", "Bytes of a tier")
HITS = MetricName("m_hits_total", "COUNTER", "Hits")


def test_the_page_is_what_prometheus_reads() -> None:
    ugly = 'a "quoted" \\ name\nof two lines'
    page = reports.prometheus_page(
        [Sample(BYTES, (("tier", "host"),), 1e9), Sample(HITS, (), 3), Sample(BYTES, (("tier", ugly), ("x", "")), 0.25)]
    )
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert {name: (family.type, family.documentation) for name, family in families.items()} == {
        "m_bytes": ("gauge", "Bytes of a tier"),
        "m_hits": ("counter", "Hits"),
    }
    assert [(sample.labels, sample.value) for sample in families["m_bytes"].samples] == [
        ({"tier": "host"}, 1e9),
        ({"tier": ugly, "x": ""}, 0.25),
    ]
    assert [sample.value for sample in families["m_hits"].samples] == [3]


def test_reports_go_on_although_discovery_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_INTERVAL_S", 0.0)

    class Operator:
        async def stats(self) -> StatsReport:
            tiers = LoRAStats(*[TierStats()] * 3, insertions=0, replacements=0, waits=0, wait_seconds=0.0)
            return StatsReport(tiers, {}, Usage(), LoadReport(EngineStats(), AdaptersInUse(), RequestStats()))

    class Publisher:
        num_published = 0

        def publish(self, rank: int, snapshot: Any) -> None:
            self.num_published += 1

    async def tell(_: Residency) -> None:
        if publisher.num_published == 1:
            raise RuntimeError("discovery is gone")
        raise asyncio.CancelledError

    publisher = Publisher()
    reporter = reports.StatsReporter(Operator(), "tiny", lambda: 0, tell)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(reporter.run(publisher), 30))
    assert publisher.num_published == 2


def test_the_load_of_a_worker() -> None:
    idle = reports.snapshot(EngineStats(num_blocks=8, num_free_blocks=8))
    assert (idle.kv_used_blocks, idle.gpu_cache_usage, idle.kv_cache_hit_rate) == (0, 0.0, None)
    busy = reports.snapshot(
        EngineStats(num_blocks=8, num_free_blocks=2, prefix_cache=PrefixCacheStats(queried_tokens=40, hit_tokens=10))
    )
    assert (busy.kv_used_blocks, busy.kv_total_blocks, busy.gpu_cache_usage) == (6, 8, 0.75)
    assert (busy.kv_cache_hit_rate, busy.dp_rank) == (0.25, 0)
