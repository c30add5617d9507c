"""The requests of the server's benchmark, its yardsticks, and its reading of the answers."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path

import pytest
from rich.progress import Progress

from benchmarks.bench_engine import save_tiny_model
from benchmarks.bench_serving import (
    EngineInProcess,
    FreshPrompts,
    Results,
    Setting,
    engine_in_process,
    measure_cost,
    measure_doors,
    mixed_targets,
    quantized_rows,
    random_adapter,
    result_rows,
)
from benchmarks.cpu_times import CLIENT, CpuTimes
from multilora_client.bench.load import Sample
from multilora_client.bench.workload import Job, Target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def sample(first_s: float = 0.5, done_s: float = 2.0, error: str = "") -> Sample:
    return Sample(Job(Target(), "x"), 0.0, 0.0, (first_s, done_s), done_s, "text", 1, 4, error)


@pytest.mark.parametrize(
    ("mix", "expected"),
    [("no adapter", ["", "", ""]), ("one adapter", ["a", "a", "a"]), ("all different", ["a", "b", "c"])],
)
def test_a_mix_tells_whom_each_request_asks(mix: str, expected: list[str]) -> None:
    adapters = [Target(content=name) for name in "abcd"]
    assert [target.content for target in mixed_targets(mix, 3, adapters)] == expected


def test_no_prompt_comes_twice() -> None:
    prompts = FreshPrompts(16)
    assert len({*prompts.take(20), *prompts.take(20)}) == 40


def test_rows_are_medians_and_the_goal_is_of_each_round_by_itself() -> None:
    results = Results()
    for seconds in (1.0, 2.0, 8.0):
        results.add("through ensemble", [sample(0.1 * seconds, seconds)] * 2)
    results.rates["in this process"] = [10.0, 4.0, 1.0]
    rows = {row.what: row for row in result_rows(results)}
    assert rows["through ensemble"].value == 4.0
    assert math.isclose(rows["first token, through ensemble"].value, 200.0)
    share = rows["ensemble, of in this process"]
    assert (share.value, share.is_met) == (100.0, True)


def test_doors_of_a_quantised_model_have_the_engine_s_share_of_each_round_and_a_goal() -> None:
    results = Results({"in this process": [10.0, 4.0, 1.0], "through ensemble": [8.0, 3.0, 1.0]})
    rows = {row.what: row for row in quantized_rows("w4a16, 1 at once", results)}
    assert rows["w4a16, 1 at once: through ensemble"].value == 3.0
    share = rows["w4a16, 1 at once: ensemble, of in this process"]
    assert (share.value, share.is_met, share.goal) == (80.0, False, ">= 85")


def test_the_doors_are_measured_in_turn_by_the_engine_and_by_each_way_to_the_server(model: Path) -> None:
    asked: list[str] = []

    async def ask(job: Job, due_s: float) -> Sample:
        asked.append(job.prompt)
        return sample()

    results = Results()
    setting = Setting(
        model, concurrency=[2], rates=[], load_seconds=0, rounds=3, rank=1, prompt_tokens=4, output_tokens=4
    )
    with engine_in_process(model) as engine:
        asks = {"through generation": ask, "through ensemble": ask}
        asyncio.run(measure_doors(engine, asks, setting, 2, FreshPrompts(4), results, Progress()))
    assert {name: len(rates) for name, rates in results.rates.items()} == dict.fromkeys(("in this process", *asks), 3)
    assert len({*asked}) == len(asked) == 2 * 2 * 3


def test_a_cost_is_of_a_token_in_each_process_that_did_anything_the_dearest_first() -> None:
    results = Results()
    for factor in (1.0, 2.0, 9.0):
        seconds = {"engine": 0.064 * factor, "tritonserver": 0.08, "adapters": 0.0}
        results.add_cost("through ensemble", [sample()] * 4, seconds)
    rows = [(row.what, round(row.value, 6), row.unit) for row in result_rows(results)]
    assert rows == [
        ("engine, through ensemble", 8.0, "CPU ms/token"),
        ("tritonserver, through ensemble", 5.0, "CPU ms/token"),
        ("all of it, through ensemble", 13.0, "CPU ms/token"),
    ]


def test_the_cost_of_each_door_is_measured_in_every_round(tmp_path: Path) -> None:
    async def ask(job: Job, due_s: float) -> Sample:
        return sample()

    results, cpu_times = Results(), CpuTimes(os.getpid())
    setting = Setting(
        tmp_path, concurrency=[1, 2], rates=[], load_seconds=0, rounds=3, rank=1, prompt_tokens=4, output_tokens=4
    )
    asks = {"through generation": ask, "through ensemble": ask}
    asyncio.run(measure_cost(asks, cpu_times, setting, FreshPrompts(4), results, Progress()))
    assert {name: len(costs) for name, costs in results.costs.items()} == dict.fromkeys(asks, 3)
    assert all(cost[CLIENT] > 0 for costs in results.costs.values() for cost in costs)


def test_a_failed_request_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="through ensemble: requests failed with UNAVAILABLE"):
        Results().add("through ensemble", [sample(), sample(error="UNAVAILABLE")])


def test_adapters_fit_the_model_that_is_served(model: Path) -> None:
    adapter = random_adapter(model, 3, rank=2)
    assert set(adapter.tensors.config[:, 2]) == {2}
    assert len(adapter.tensors.config) % 7 == 0


def test_the_engine_in_this_process_answers_prompts_of_any_number(model: Path) -> None:
    engine = EngineInProcess(model)
    assert engine.tokens_per_s(["a", "b", "c"], 4) > 0
    engine.close()
