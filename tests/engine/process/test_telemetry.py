from __future__ import annotations

import pytest

from multilora_engine.histogram import Histogram
from multilora_engine.process import telemetry
from multilora_engine.process.telemetry import RequestTelemetry
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


def test_the_batch_is_who_got_tokens(clock: Clock) -> None:
    requests = RequestTelemetry()
    for request_id in "abc":
        requests.begin(request_id)
    requests.record([output("a", 1), output("b", 1), output("c", 0, "cancelled")])
    requests.record([])
    assert requests.stats.batch_size.total == 2
    assert sum(requests.stats.batch_size.counts) == 1


def test_every_end_is_counted_once(clock: Clock) -> None:
    requests = RequestTelemetry()
    requests.refuse("NOT_FOUND", 3)
    for request_id in "abc":
        requests.begin(request_id)
    requests.drop("a")
    requests.record([output("b", 0, error_code="INTERNAL")])
    requests.record([output("c", 1, "length")])
    assert requests.stats.requests == {"NOT_FOUND": 3, "cancelled": 1, "INTERNAL": 1, "length": 1}
