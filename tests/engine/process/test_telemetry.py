from __future__ import annotations

from random import Random

import pytest

from multilora_engine.histogram import Histogram
from multilora_engine.lora.names import TenantTaskId
from multilora_engine.process import telemetry
from multilora_engine.process.telemetry import AdapterUsage, RequestTelemetry, Usage
from multilora_engine.request import BeamOutput, FinishReason, PerfMetrics, TokenOutput


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(telemetry, "time", clock)
    return clock


def output(
    request_id: str, num_tokens: int, finish_reason: FinishReason | None = None, **fields: object
) -> TokenOutput:
    return TokenOutput(request_id, [1] * num_tokens, "", finish_reason=finish_reason, **fields)  # type: ignore[arg-type]


def num_up_to(histogram: Histogram, bound: float) -> int:
    return sum(count for b, count in zip(histogram.bounds, histogram.counts, strict=False) if b <= bound)


def test_times_are_those_a_client_sees(clock: Clock) -> None:
    requests = RequestTelemetry()
    requests.begin("a")
    clock.now += 2.0
    requests.record([output("a", 1)])
    clock.now += 0.18
    requests.record([output("a", 2)])
    clock.now += 0.5
    perf = PerfMetrics(arrival_time_ns=5 * 10**9, first_scheduled_time_ns=6 * 10**9)
    requests.record([output("a", 1, "stop", num_prompt_tokens=7, perf=perf)])
    stats = requests.stats
    assert (stats.first_token_seconds.total, stats.queue_seconds.total) == pytest.approx((2.0, 1.0))
    assert stats.inter_token_seconds.total == pytest.approx(0.68)
    assert num_up_to(stats.inter_token_seconds, 0.1) == 2
    assert stats.request_seconds.total == pytest.approx(2.68)
    assert (stats.prompt_tokens, stats.output_tokens) == (7, 4)
    assert stats.requests == {"stop": 1}


def test_tokens_of_beams_count_and_leave_when_the_search_ends(clock: Clock) -> None:
    requests = RequestTelemetry()
    requests.begin("a")
    clock.now += 3.0
    beams = [BeamOutput([1] * num_tokens, "", "stop", [], 0.0) for num_tokens in (4, 2)]
    requests.record([output("a", 0, "stop", num_output_tokens=6, beams=beams)])
    stats = requests.stats
    assert stats.output_tokens == 6
    assert (stats.first_token_seconds.total, sum(stats.first_token_seconds.counts)) == (3.0, 1)
    assert stats.batch_size.total == 1


def test_the_batch_is_who_got_tokens_and_their_different_adapters(clock: Clock) -> None:
    requests = RequestTelemetry()
    for request_id, adapter in {"a": 7, "b": 7, "c": 8, "d": None, "e": TenantTaskId("x", 7)}.items():
        requests.begin(request_id, adapter)
    requests.record([output("a", 1), output("b", 1), output("c", 0, "cancelled")])
    requests.record([])
    requests.record([output("d", 1)])
    requests.record([output("a", 1), output("d", 1), output("e", 2)])
    assert (requests.stats.batch_size.total, requests.stats.batch_adapters.total) == (6, 3)
    assert sum(requests.stats.batch_size.counts) == sum(requests.stats.batch_adapters.counts) == 3


def test_every_end_is_counted_once(clock: Clock) -> None:
    requests = RequestTelemetry()
    requests.refuse("NOT_FOUND", 3)
    for request_id in "abc":
        requests.begin(request_id)
    requests.drop("a")
    requests.record([output("b", 0, error_code="INTERNAL")])
    requests.record([output("c", 1, "length")])
    assert requests.stats.requests == {"NOT_FOUND": 3, "cancelled": 1, "INTERNAL": 1, "length": 1}


def test_a_request_is_counted_for_its_adapter() -> None:
    usage = AdapterUsage(max_adapters=2)
    usage.record("7", prompt_tokens=3, output_tokens=5)
    usage.record("7", prompt_tokens=1, output_tokens=1)
    assert usage.by_label == {"7": Usage(2, 4, 6)}
    assert usage.other == Usage()


def test_adapters_beyond_the_places_are_counted_together() -> None:
    usage = AdapterUsage(max_adapters=2)
    for label in "112234":
        usage.record(label, 1, 1)
    assert set(usage.by_label) == {"1", "2"}
    assert usage.other.requests == 2


def test_an_adapter_asked_for_much_more_takes_the_place_of_the_last_and_starts_at_zero() -> None:
    usage = AdapterUsage(max_adapters=2)
    for label in "111233":
        usage.record(label, 1, 1)
    assert usage.by_label == {"1": Usage(3, 3, 3), "3": Usage(1, 1, 1)}
    assert usage.other == Usage(1, 1, 1)


def test_with_no_places_everything_is_other() -> None:
    usage = AdapterUsage(max_adapters=0)
    usage.record("1", 2, 3)
    assert (usage.by_label, usage.other) == ({}, Usage(1, 2, 3))


def test_under_any_load_no_count_falls_and_space_is_bounded() -> None:
    usage, random = AdapterUsage(max_adapters=4), Random(0)
    before: dict[str, int] = {}
    for _ in range(3000):
        other = usage.other.requests
        label = str(int(random.paretovariate(0.6)))
        usage.record(label, 1, 1)
        now = {label: counted.requests for label, counted in usage.by_label.items()}
        assert all(now[label] >= before[label] for label in now.keys() & before.keys())
        assert sum(now.get(i, 0) - before.get(i, 0) for i in now) + usage.other.requests - other == 1
        assert len(now) <= 4
        assert len(usage._popularity) <= 64
        before = now
