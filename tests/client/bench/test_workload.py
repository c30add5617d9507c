"""Shares against their formula, arrivals against the definition of a Poisson process."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from multilora_client import Adapter, AdapterTensors
from multilora_client.bench.workload import (
    Target,
    clone_adapters,
    make_jobs,
    make_prompts,
    poisson_arrivals,
    popularity_shares,
    uploaded_adapters,
)


def test_zipf_shares_fall_with_the_power_of_the_rank() -> None:
    shares = popularity_shares("zipf", 100, 1.2)
    assert shares.sum() == pytest.approx(1)
    assert shares[0] / shares[9] == pytest.approx(10**1.2)
    assert shares[4] / shares[49] == pytest.approx(10**1.2)


def test_uniform_shares_are_equal() -> None:
    assert popularity_shares("uniform", 8, 1.2).tolist() == [1 / 8] * 8


def test_arrivals_are_a_poisson_process_of_the_given_rate() -> None:
    gaps = np.diff([0.0, *poisson_arrivals(4.0, 5000, seed=3)])
    # Kolmogorov-Smirnov at 1 %: the largest distance of the gaps from the exponential distribution.
    distance = np.abs(np.linspace(0, 1, len(gaps)) - (1 - np.exp(-4.0 * np.sort(gaps)))).max()
    assert distance < 1.63 / np.sqrt(len(gaps))
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.05


def test_arrivals_repeat_with_their_seed_and_scale_with_their_rate() -> None:
    slow, fast = poisson_arrivals(1.0, 10, seed=3), poisson_arrivals(2.0, 10, seed=3)
    assert poisson_arrivals(1.0, 10, seed=3) == slow != poisson_arrivals(1.0, 10, seed=4)
    assert fast == pytest.approx(np.array(slow) / 2)


def test_clones_share_the_weights_of_the_adapters_in_turn(small_tensors: AdapterTensors) -> None:
    other = AdapterTensors(small_tensors.weights * 2, small_tensors.config, "FP16")
    targets = clone_adapters([("a", Adapter(1, small_tensors)), ("b", Adapter(1, other))], 5, first_task_id=70)
    assert [target.content for target in targets] == ["a", "b", "a", "b", "a"]
    adapters = [target.adapter for target in targets if target.adapter]
    assert [adapter.lora_task_id for adapter in adapters] == [70, 71, 72, 73, 74]
    assert [adapter.content for adapter in adapters] == [small_tensors, other, small_tensors, other, small_tensors]


def test_jobs_ask_targets_by_their_shares_and_prompts_in_turn() -> None:
    targets = [Target(content=name) for name in "abc"]
    jobs = make_jobs(targets, popularity_shares("zipf", 3, 1.0), ["x", "y"], 6000, seed=0)
    assert [job.prompt for job in jobs[:4]] == ["x", "y", "x", "y"]
    counts = Counter(job.target.content for job in jobs)
    for rank, name in enumerate("abc", start=1):
        share = 1 / rank / (1 + 1 / 2 + 1 / 3)
        assert abs(counts[name] - 6000 * share) < 3 * np.sqrt(6000 * share * (1 - share))


def test_adapters_that_are_there_are_asked_in_turn_so_that_as_many_at_once_are_all_different() -> None:
    targets = uploaded_adapters(5, first_task_id=70)
    jobs = make_jobs(targets, popularity_shares("turn", 5, 1.0), ["x"], 23, seed=0)
    asked = [job.target.lora_task_id for job in jobs]
    assert all(len(set(asked[start : start + 5])) == 5 for start in range(19))
    assert set(asked) == set(range(70, 75))
    assert len({target.content for target in targets}) == 5


def test_prompts_differ_from_their_first_words_on() -> None:
    prompts = make_prompts(200, 128, seed=0)
    assert {len(prompt.split(" ")) for prompt in prompts} == {128}
    assert len({tuple(prompt.split(" ")[:8]) for prompt in prompts}) == 200
