"""The requests of the server's benchmark, its yardsticks, its reading of the answers, and its tables on the page."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path

import pytest
from rich.progress import Progress

from benchmarks import bench_serving
from benchmarks.bench_engine import save_tiny_model
from benchmarks.bench_serving import (
    EngineInProcess,
    Measurement,
    Results,
    Setting,
    load_table,
    measurement,
    mixed_targets,
    random_adapter,
    rate_rows,
    result_rows,
    throughput_table,
    write_tables,
)
from benchmarks.cpu_times import CLIENT, CpuTimes
from marked_tables import read_table
from multilora_client.bench.load import Load, Sample
from multilora_client.bench.report import Stage
from multilora_client.bench.workload import Job, Target
from plots import PERFORMANCE

DOORS = ("through generation", "through ensemble")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def sample(first_s: float = 0.5, done_s: float = 2.0, error: str = "") -> Sample:
    return Sample(Job(Target(), "x"), 0.0, 0.0, (first_s, done_s), done_s, "text", 1, 4, error)


def measurements(model: Path, asked: list[str], **setting: object) -> Measurement:
    """Of doors that answer at once. asked: gets the prompts."""

    async def ask(job: Job, due_s: float) -> Sample:
        asked.append(job.prompt)
        return sample()

    fields = {"concurrency": [2], "rates": [], "load_seconds": 0, "rounds": 3, "rank": 1, **setting}
    setting_ = Setting(model, prompt_tokens=4, output_tokens=4, **fields)  # type: ignore[arg-type]
    return Measurement(setting_, dict.fromkeys(DOORS, ask), [], Progress())


@pytest.mark.parametrize(
    ("mix", "expected"),
    [("no adapter", ["", "", ""]), ("one adapter", ["a", "a", "a"]), ("all different", ["a", "b", "c"])],
)
def test_a_mix_tells_whom_each_request_asks(mix: str, expected: list[str]) -> None:
    adapters = [Target(content=name) for name in "abcd"]
    assert [target.content for target in mixed_targets(mix, 3, adapters)] == expected


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
    rows = {row.what: row for row in rate_rows(results, 85, "w4a16, 1 at once: ")}
    assert rows["w4a16, 1 at once: through ensemble"].value == 3.0
    share = rows["w4a16, 1 at once: ensemble, of in this process"]
    assert (share.value, share.is_met, share.goal) == (80.0, False, ">= 85")


def test_the_doors_are_measured_in_turn_by_the_engine_and_by_each_way_to_the_server(model: Path) -> None:
    """And no prompt comes twice."""
    asked: list[str] = []
    measured = measurements(model, asked)
    asyncio.run(measured.doors(2))
    rates = measured.results.rates
    assert {name: len(values) for name, values in rates.items()} == dict.fromkeys(("in this process", *DOORS), 3)
    assert len({*asked}) == len(asked) == 2 * 2 * 3


def test_a_cost_is_of_a_token_in_each_process_that_did_anything_the_dearest_first() -> None:
    results = Results()
    for factor in (1.0, 2.0, 9.0):
        seconds = {"engine": 0.064 * factor, "tritonserver": 0.08, "adapters": 0.0}
        results.add("through ensemble", [sample()] * 4, seconds)
    rows = [(row.what, round(row.value, 6), row.unit) for row in result_rows(results)]
    assert rows == [
        ("engine, through ensemble", 8.0, "CPU ms/token"),
        ("tritonserver, through ensemble", 5.0, "CPU ms/token"),
        ("all of it, through ensemble", 13.0, "CPU ms/token"),
    ]


def test_the_cost_of_each_door_is_measured_in_every_round(tmp_path: Path) -> None:
    measured = measurements(tmp_path, [], concurrency=[1, 2])
    asyncio.run(measured.cost(CpuTimes(os.getpid())))
    costs = measured.results.costs
    assert {name: len(of_door) for name, of_door in costs.items()} == dict.fromkeys(DOORS, 3)
    assert all(cost[CLIENT] > 0 for of_door in costs.values() for cost in of_door)


def test_a_failed_request_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        Results().add("through ensemble", [sample(), sample(error="UNAVAILABLE")])


def test_adapters_fit_the_model_that_is_served(model: Path) -> None:
    adapter = random_adapter(model, 3, rank=2)
    assert set(adapter.content.config[:, 2]) == {2}
    assert len(adapter.content.config) % 7 == 0


def test_the_engine_in_this_process_answers_prompts_of_any_number(model: Path) -> None:
    engine = EngineInProcess(model)
    assert engine.tokens_per_s(["a", "b", "c"], 4) > 0
    engine.close()


def stage(rate: float, times: tuple[float, ...], error: str = "") -> Stage:
    return Stage(Load(rate, is_open=True), [Sample(Job(Target(), "x"), 0.0, 0.0, times, times[-1], "", 1, 4, error)])


def test_throughput_is_the_median_of_each_mix_without_exponents() -> None:
    rates = {measurement(1, mix): [1029.6, 1000, 1030] for mix in ("no adapter", "one adapter", "all different")}
    lines = throughput_table({**rates, "through ensemble": [9.0]}, [1]).splitlines()
    assert lines[:2] == read_table(PERFORMANCE, "throughput").splitlines()[:2]
    assert lines[2:] == ["| 1 | 1,030 | 1,030 | 1,030 | tokens/s |"]


def test_times_of_the_load_are_in_their_units_and_missing_ones_are_said() -> None:
    lines = load_table([stage(4, (0.267, 0.324)), stage(6, (14.7, 14.7), error="TIMED_OUT")]).splitlines()
    assert lines[:2] == read_table(PERFORMANCE, "load").splitlines()[:2]
    assert lines[2:] == ["| 4 | 267 ms | 267 ms | 57 ms | 57 ms |", "| 6 | – | – | – | – |"]


def test_what_was_not_measured_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, drawn = tmp_path / "page.md", list[Path]()
    page.write_text(PERFORMANCE.read_text())
    monkeypatch.setattr(bench_serving, "PERFORMANCE", page)
    monkeypatch.setattr(bench_serving, "write_plots", drawn.append)
    write_tables(Results(stages=[stage(4, (0.3, 0.4))]), [1], "By a test.")
    assert "| 4 | 300 ms |" in read_table(page, "load")
    assert read_table(page, "load").endswith(" |\n\nBy a test.\n")
    assert read_table(page, "throughput") == read_table(PERFORMANCE, "throughput")
    assert drawn == [page]
