from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.adapters import TINY, wire_adapter
from support.fake_engine import FakeEngine
from support.fake_triton import FakeMetricFamily
from support.fronts import TIMEOUT_S, RecordingListener, generation_request
from support.served_engine import served

from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats
from multilora_engine.histogram import Histogram
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.life_cycle import LoRAStats, Residency, Resident, TierStats
from multilora_engine.process.client import EngineClient
from multilora_engine.process.operations import LoadReport, StatsReport
from multilora_engine.process.telemetry import RequestStats, Usage
from multilora_engine.serving.metrics import (
    ENGINE_METRICS,
    ENGINE_RESTARTS,
    HISTOGRAMS,
    LOAD_SECONDS,
    LOAD_SECONDS_MEANING,
    LORA_ADAPTER_LOADED,
    LORA_REQUESTS_INFO,
    TIER_METRICS,
    USAGE_METRICS,
    LoadSeconds,
    MetricsPublisher,
    Sample,
    TritonMetrics,
    samples,
)

GAUGE, COUNTER = TIER_METRICS["bytes_used"], TIER_METRICS["hits"]
HOST, DEVICE = (("tier", "host"),), (("tier", "device"),)


@pytest.fixture
def published() -> Iterator[dict[tuple[str, tuple[tuple[str, str], ...]], float]]:
    FakeMetricFamily.published.clear()
    FakeMetricFamily.num_calls = 0
    yield FakeMetricFamily.published
    assert FakeMetricFamily.published == {}
    assert FakeMetricFamily.observed == {}


def an_idle_engine() -> LoadReport:
    return LoadReport(EngineStats(), AdaptersInUse(), RequestStats())


def no_adapters() -> LoRAStats:
    tier = TierStats()
    return LoRAStats(tier, tier, tier, insertions=0, replacements=0, waits=0, wait_seconds=0.0)


def test_everything_that_is_counted_has_a_metric() -> None:
    tiers = {name for name, kind in get_type_hints(LoRAStats).items() if kind not in (int, float)}
    assert set(TIER_METRICS) == {field.name for field in fields(TierStats)}
    assert set(ENGINE_METRICS) == {field.name for field in fields(LoRAStats)} - tiers
    assert set(USAGE_METRICS) == {field.name for field in fields(Usage)}
    histograms = {name for name, kind in get_type_hints(RequestStats).items() if kind is Histogram}
    assert set(HISTOGRAMS) == histograms


def test_values_are_taken_from_the_report_with_their_labels() -> None:
    tier = TierStats(bytes_used=5)
    host, disk = TierStats(hits=3), TierStats(failures=1)
    tiers = LoRAStats(tier, host, disk, insertions=2, replacements=0, waits=0, wait_seconds=0.5)
    report = StatsReport(tiers, {"18446744073709551615": Usage(7, 1, 1)}, Usage(9, 1, 1), an_idle_engine())
    values = {(sample.metric.name, sample.labels): sample.value for sample in samples(report, "base")}
    assert values["multilora_lora_tier_used_bytes", DEVICE] == 5
    assert values["multilora_lora_tier_hits_total", HOST] == 3
    assert values["multilora_lora_tier_failures_total", (("tier", "disk"),)] == 1
    assert values["multilora_lora_insertions_total", ()] == 2
    assert values["multilora_lora_wait_seconds_total", ()] == 0.5
    assert values["multilora_lora_requests_total", (("lora_task_id", "18446744073709551615"),)] == 7
    assert values["multilora_lora_requests_total", (("lora_task_id", "other"),)] == 9


def test_tenants_are_counted_by_name_and_the_rest_together() -> None:
    report = StatsReport(
        no_adapters(), {}, Usage(), an_idle_engine(), clients={"acme": Usage(2, 3, 4)}, other_clients=Usage(5, 6, 7)
    )
    values = {(sample.metric.name, sample.labels): sample.value for sample in samples(report, "base")}
    assert values["multilora_client_requests_total", (("client", "acme"),)] == 2
    assert values["multilora_client_output_tokens_total", (("client", ""),)] == 7


def test_prometheus_own_reader_finds_the_histograms_cumulative() -> None:
    requests = RequestStats()
    for seconds in (0.0005, 0.02, 0.02, 1000.0):
        requests.inter_token_seconds.observe(seconds)
    report = StatsReport(no_adapters(), {}, Usage(), LoadReport(EngineStats(), AdaptersInUse(), requests))
    lines = [
        sample.metric.name + "{" + ",".join(f'{name}="{value}"' for name, value in sample.labels) + f"}} {sample.value}"
        for sample in samples(report, "base")
        if sample.metric.name.startswith("multilora_inter_token_seconds")
    ]
    text = "\n".join(["# TYPE multilora_inter_token_seconds histogram", *lines, ""])
    (family,) = text_string_to_metric_families(text)
    values = {
        (s.name.removeprefix("multilora_inter_token_seconds"), s.labels.get("le")): s.value for s in family.samples
    }
    assert values["_bucket", "0.001"] == 1
    assert values["_bucket", "0.01"] == 1
    assert values["_bucket", "0.025"] == 3
    assert values["_bucket", "300.0"] == 3
    assert values["_bucket", "+Inf"] == values["_count", None] == 4
    assert values["_sum", None] == pytest.approx(1000.0405)


def test_gateways_read_the_adapters_in_use_from_labels() -> None:
    adapters = AdaptersInUse(max_loras=4, running=["7", "pirate"], waiting=[str(i) for i in range(100, 300)])
    report = StatsReport(no_adapters(), {}, Usage(), LoadReport(EngineStats(), adapters, RequestStats()))
    (info,) = [sample for sample in samples(report, "base") if sample.metric is LORA_REQUESTS_INFO]
    labels = dict(info.labels)
    assert labels["max_lora"] == "4"
    assert labels["running_lora_adapters"] == "7,pirate"
    assert len(labels["waiting_lora_adapters"].split(",")) == 64
    assert info.value == pytest.approx(time.time(), abs=60)


def test_gateways_read_who_is_in_memory_from_labels() -> None:
    residents = [Resident("pirate", "gpu", is_pinned=True, rank=8), Resident("7", "cpu", is_pinned=False, rank=64)]
    residency = Residency(residents, num_on_device=1, num_in_memory=2, max_loras=4)
    report = StatsReport(no_adapters(), {}, Usage(), an_idle_engine(), residency)
    values = {(sample.metric.name, sample.labels): sample.value for sample in samples(report, "base")}
    pirate = (("adapter_name", "pirate"), ("level", "gpu"), ("pinned", "true"), ("rank", "8"))
    seven = (("adapter_name", "7"), ("level", "cpu"), ("pinned", "false"), ("rank", "64"))
    assert values["multilora_lora_adapter_loaded", pirate] == 1
    assert values["multilora_lora_adapter_loaded", seven] == 1
    assert values["multilora_num_gpu_loaded_lora_adapters", (("model_name", "base"),)] == 1
    assert values["multilora_num_cpu_loaded_lora_adapters", ()] == 2
    assert values["multilora_max_gpu_lora_adapters", ()] == 4


def test_an_adapter_that_goes_is_at_0_at_once_and_its_family_is_made_anew_when_half_of_it_is(
    published: dict[tuple[str, tuple[tuple[str, str], ...]], float],
) -> None:
    metrics = TritonMetrics(max_withdrawn=2)
    labels = [(("adapter_name", str(number)),) for number in range(12)]

    def shown(first: int, end: int) -> dict[str, float]:
        metrics.update([Sample(LORA_ADAPTER_LOADED, label, 1) for label in labels[first:end]])
        return {label[0][1]: value for (_, label), value in published.items()}

    assert shown(0, 6) == dict.fromkeys("012345", 1)
    assert shown(4, 8) == dict.fromkeys("0123", 0) | dict.fromkeys("4567", 1)
    assert shown(3, 8) == dict.fromkeys("012", 0) | dict.fromkeys("34567", 1), "one that comes back needs no new family"
    assert shown(6, 9) == dict.fromkeys("678", 1)
    metrics.clear()


def test_adapters_in_use_are_the_latest_even_when_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    values = list[float]()
    for now_s in (2e9, 1e9):
        monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
        report = StatsReport(no_adapters(), {}, Usage(), an_idle_engine())
        values += [sample.value for sample in samples(report, "base") if sample.metric is LORA_REQUESTS_INFO]
    before, after = values
    assert before < after


def test_metrics_follow_the_samples_and_only_changes_are_sent(
    published: dict[tuple[str, tuple[tuple[str, str], ...]], float],
) -> None:
    metrics = TritonMetrics()
    metrics.update([Sample(GAUGE, HOST, 5), Sample(COUNTER, HOST, 10), Sample(COUNTER, DEVICE, 1)])
    metrics.update([Sample(GAUGE, HOST, 3), Sample(COUNTER, HOST, 12), Sample(COUNTER, DEVICE, 1)])
    assert published == {(GAUGE.name, HOST): 3, (COUNTER.name, HOST): 12, (COUNTER.name, DEVICE): 1}
    assert FakeMetricFamily.num_calls == 5
    metrics.clear()


def test_a_counter_goes_on_when_a_new_engine_counts_from_zero(
    published: dict[tuple[str, tuple[tuple[str, str], ...]], float],
) -> None:
    metrics = TritonMetrics()
    for value in (10, 4, 5):
        metrics.update([Sample(COUNTER, HOST, value)])
    assert published[COUNTER.name, HOST] == 15
    metrics.clear()


def test_metrics_without_a_value_stay_until_they_are_too_many_and_go_on_where_they_were(
    published: dict[tuple[str, tuple[tuple[str, str], ...]], float],
) -> None:
    adapters = [(("lora_task_id", str(i)),) for i in range(4)]
    metrics = TritonMetrics(max_withdrawn=2)
    for labels in adapters[:3]:
        metrics.update([Sample(COUNTER, labels, 10)])
    assert published == {(COUNTER.name, labels): 10 for labels in adapters[:3]}
    metrics.update([Sample(COUNTER, adapters[1], 1)])
    assert published == {(COUNTER.name, labels): value for labels, value in zip(adapters, (10, 11, 10), strict=False)}
    metrics.update([Sample(COUNTER, adapters[3], 5)])
    assert published == {(COUNTER.name, adapters[3]): 5}
    metrics.clear()


def test_a_metric_without_a_value_is_removed_and_starts_anew(
    published: dict[tuple[str, tuple[tuple[str, str], ...]], float],
) -> None:
    metrics = TritonMetrics(max_withdrawn=0, max_withdrawn_share=0.0)
    metrics.update([Sample(COUNTER, HOST, 10)])
    metrics.update([])
    assert published == {}
    metrics.update([Sample(COUNTER, HOST, 2)])
    assert published == {(COUNTER.name, HOST): 2}
    metrics.clear()


def test_what_stays_in_a_family_is_shown_again_as_it_was_when_another_metric_of_it_goes(
    published: dict[tuple[str, tuple[tuple[str, str], ...]], float],
) -> None:
    metrics = TritonMetrics(max_withdrawn=0, max_withdrawn_share=0.0)
    metrics.update([Sample(COUNTER, HOST, 10), Sample(COUNTER, DEVICE, 1), Sample(GAUGE, HOST, 4)])
    metrics.update([Sample(COUNTER, HOST, 3), Sample(COUNTER, DEVICE, 1), Sample(GAUGE, HOST, 4)])
    metrics.update([Sample(COUNTER, HOST, 3)])
    assert published == {(COUNTER.name, HOST): 13}
    metrics.update([Sample(COUNTER, HOST, 5), Sample(COUNTER, DEVICE, 2)])
    assert published == {(COUNTER.name, HOST): 15, (COUNTER.name, DEVICE): 2}
    metrics.clear()


def test_what_an_engine_did_is_published_and_withdrawn_at_the_end(
    published: dict[tuple[str, tuple[tuple[str, str], ...]], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, update = threading.Event(), TritonMetrics.update
    key = ("multilora_lora_output_tokens_total", (("lora_task_id", "7"),))

    def update_and_tell(metrics: TritonMetrics, latest: Iterator[Sample]) -> None:
        update(metrics, latest)
        if published.get(key) == 5:
            seen.set()

    monkeypatch.setattr(TritonMetrics, "update", update_and_tell)
    wire = wire_adapter(TINY, [(1, 0, 4)])
    with served(FakeEngine(), tmp_path / "engine.sock"):
        client, listener = EngineClient(tmp_path / "engine.sock"), RecordingListener()
        client.wait_until_ready(TIMEOUT_S)
        publisher = MetricsPublisher(client, lambda: 3, "base", interval_s=0.01)
        request = generation_request("r", [1, 2], max_tokens=5, lora_task_id=7)
        client.generate(listener, [request], adapter=(7, pack_adapter(wire.weights, wire.config, TINY)))
        assert seen.wait(TIMEOUT_S)
        assert published["multilora_lora_tier_adapters", HOST] == 1
        assert published["multilora_output_tokens_total", ()] == 5
        assert published["multilora_requests_total", (("outcome", "length"),)] == 1
        assert published["multilora_engine_restarts_total", ()] == 3
        resident = (("adapter_name", "7"), ("level", "cpu"), ("pinned", "false"), ("rank", "4"))
        assert published[LORA_ADAPTER_LOADED.name, resident] == 1
        publisher.close()
        client.close()


def test_without_an_engine_nothing_is_published(
    published: dict[tuple[str, tuple[tuple[str, str], ...]], float], tmp_path: Path
) -> None:
    client = EngineClient(tmp_path / "nobody.sock")
    publisher = MetricsPublisher(client, lambda: 0, "base")
    publisher.close()
    client.close()
    assert published == {}


def test_the_docs_list_every_metric_with_its_kind_labels_and_meaning() -> None:
    residents = [Resident("7", "cpu", is_pinned=False, rank=64)]
    adapters = Residency(residents, num_on_device=0, num_in_memory=1, max_loras=4)
    load = LoadReport(EngineStats(), AdaptersInUse(), RequestStats(requests={"stop": 1}))
    report = StatsReport(no_adapters(), {}, Usage(), load, residency=adapters, clients={"acme": Usage()})
    rows = {_row(LOAD_SECONDS, "histogram", ["transition"], LOAD_SECONDS_MEANING)}
    for sample in [*samples(report, "base"), Sample(ENGINE_RESTARTS, (), 0)]:
        name = re.sub("_(bucket|sum|count)$", "", sample.metric.name)
        kind = sample.metric.kind.lower() if name == sample.metric.name else "histogram"
        labels = [label for label, _ in sample.labels if label != "le"]
        rows.add(_row(name, kind, labels, sample.metric.description))
    page = (Path(__file__).parents[3] / "docs" / "operating.md").read_text()
    table = page.split("<!-- metrics: begin -->\n")[1].split("<!-- metrics: end -->")[0]
    assert sorted(table.splitlines()[2:]) == sorted(rows)


def _row(name: str, kind: str, labels: list[str], meaning: str) -> str:
    return f"| `{name}` | {', '.join([kind, *(f'`{label}`' for label in labels)])} | {meaning} |"


def observed(transition: str) -> list[float]:
    return FakeMetricFamily.observed[LOAD_SECONDS, (("transition", transition),)]


def test_each_load_is_observed_once_also_after_the_engine_has_begun_anew() -> None:
    load_seconds, loads, copies = LoadSeconds(), Histogram(), Histogram()
    for seconds in (0.3, 0.02):
        loads.observe(seconds)
        load_seconds.update(Residency(load_seconds=loads.plus(Histogram()), activate_seconds=copies))
    load_seconds.update(Residency(load_seconds=loads, activate_seconds=copies))
    assert observed("load") == pytest.approx([0.3, 0.02])
    assert observed("activate") == []
    anew = Histogram()
    anew.observe(2.0)
    load_seconds.update(Residency(load_seconds=anew, activate_seconds=anew))
    assert observed("load") == pytest.approx([0.3, 0.02, 2.0])
    assert observed("activate") == pytest.approx([2.0])
    load_seconds.clear()
    assert FakeMetricFamily.observed == {}
