from __future__ import annotations

from random import Random

from multilora_engine.process.telemetry import AdapterUsage, Usage


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
