"""Chunks of prompts on a device that replays captured sizes: the test alone knows how long its steps take."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from multilora_engine.engine.pace import StepTimes, StepWork
from multilora_engine.engine.padded_times import PaddedTimes, step_times

SIZES, MAX_NUM_TOKENS = [64, 128, 256, 512], 2048
OWN_S = 8e-3
NUM_OWN = 16


def padded_s(num_tokens: int) -> float:
    """Of a step with prompts: 4 ms and 25 us a token of its size. Kernel by kernel, launches take 50 ms."""
    size = next((size for size in SIZES if num_tokens <= size), 0)
    return 4e-3 + OWN_S + 25e-6 * size if size else max(50e-3, OWN_S + 25e-6 * num_tokens)


def run(times: StepTimes, allowed_s: float, count: int, seconds_of: Callable[[int], float]) -> list[int]:
    """The tokens of steps whose prompts may take so long, each measured."""
    chosen = []
    for _ in range(count):
        num_more = min(int(times.num_more(NUM_OWN, allowed_s)), MAX_NUM_TOKENS - NUM_OWN)
        times.observe(StepWork(NUM_OWN, num_more), seconds_of(NUM_OWN + num_more))
        chosen.append(NUM_OWN + num_more)
    return chosen


def measured(own_s: float = OWN_S) -> PaddedTimes:
    times = PaddedTimes(SIZES, MAX_NUM_TOKENS)
    times.observe(StepWork(NUM_OWN, 0), own_s)
    return times


@pytest.mark.parametrize(("allowed_s", "size"), [(6e-3, 64), (9e-3, 128), (11e-3, 256), (17e-3, 512), (40e-3, 512)])
def test_a_step_fills_the_largest_size_that_it_has_time_for_and_passes_the_end_of_captures_rarely(
    allowed_s: float, size: int
) -> None:
    chosen = run(measured(), allowed_s, 300, padded_s)[20:]
    assert chosen.count(size) > 0.9 * len(chosen)
    late = [tokens for tokens in chosen if padded_s(tokens) - OWN_S > 1.1 * allowed_s]
    assert len(late) <= 0.05 * len(chosen)


def test_beyond_the_captured_sizes_a_step_has_what_pays_for_its_launches() -> None:
    chosen = run(measured(), 45e-3, 300, padded_s)[20:]
    # 50 ms are 42 more than the answers' own, whatever 640 tokens would take.
    assert chosen.count(1536) > 0.9 * len(chosen)


def test_a_first_token_pays_for_the_whole_of_its_size() -> None:
    times = measured()
    run(times, 1e-9, 5, padded_s)
    assert times.num_more(NUM_OWN, 1e-9) == 64 - NUM_OWN
    assert times.num_more(64, 1e-9) == 128 - 64


def test_a_size_that_chance_made_dear_comes_back() -> None:
    times = measured()
    run(times, 11e-3, 100, padded_s)
    times.observe(StepWork(NUM_OWN, 256 - NUM_OWN), 1.0)
    assert run(times, 11e-3, 600, padded_s)[-20:].count(256) >= 19


def test_a_device_that_becomes_slower_or_faster_is_known_to_be() -> None:
    times = measured()
    run(times, 11e-3, 100, padded_s)
    for factor, size in ((3.0, 64), (1.0, 256)):
        chosen = run(times, 11e-3, 1500, lambda tokens, factor=factor: OWN_S + factor * (padded_s(tokens) - OWN_S))
        assert chosen[-50:].count(size) > 40


def test_without_captured_sizes_times_are_those_of_steps_of_any_size() -> None:
    assert type(step_times([], 256)) is StepTimes
    assert type(step_times([64], 256)) is PaddedTimes
    times = StepTimes()
    times.token_s = 0.5e-3
    assert times.num_more(NUM_OWN, 10e-3) == pytest.approx(20)
