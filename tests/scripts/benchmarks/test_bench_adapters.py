"""The adapter benchmark makes the requests that it names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.adapters import TINY

from benchmarks import bench_adapters
from benchmarks.adapter_bench import RANKS, Bench, random_wire
from benchmarks.bench_adapters import (
    Setting,
    activated_rows,
    kinds_rows,
    num_parameters,
    pause_rows,
    throughput_run,
    way_in_rows,
    write_throughput_table,
)
from benchmarks.results import Row
from checkpoints.tiny_llama import save_tiny_llama
from marked_tables import read_table
from multilora_engine.engine.engine import Engine
from multilora_engine.request import GenerationRequest
from plots import PERFORMANCE


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), num_threads=1)


def test_a_random_adapter_has_the_parameters_of_the_formula() -> None:
    weights, config = random_wire(TINY, 4, seed=0)
    sizes = [24 + 40, 24 + 8, 24 + 8, 40 + 24, 24 + 56, 56 + 24, 24 + 56]
    assert int(weights.count_nonzero()) == num_parameters(TINY, 4) == TINY.sites.num_layers * 4 * sum(sizes)
    assert config.tolist() == [[m, layer, 4, 0] for layer in range(TINY.sites.num_layers) for m in range(1, 8)]


@pytest.mark.parametrize("population", [5, 40])
def test_every_population_has_the_same_ranks_and_few_popular_adapters(bench: Bench, population: int) -> None:
    tasks = Counter(bench.draw(population) for _ in range(4000))
    ranks = Counter({rank: sum(tasks[t] for t in range(i, population, 4)) for i, rank in enumerate(RANKS)})
    assert set(tasks) == set(range(population))
    assert max(ranks.values()) < 1.2 * min(ranks.values())
    assert tasks[0] > 1.5 * tasks[4]


def test_an_engine_holds_its_adapters_and_answers_all_requests(bench: Bench) -> None:
    with bench.engine(max_loras=4, num_adapters=9) as engine:
        assert engine.stats.num_cached_adapters == 9
        answers = bench.serve(engine, [bench.request(task, 5, 3) for task in range(1, 8)], num_clients=2)
        engine.put_adapter(9, bench.adapter(9))
        assert engine.stats.num_cached_adapters <= 9, "it should have had to evict"
    assert [len(times) for times in answers] == [3] * 7
    assert all(sorted(times) == times for times in answers)


def test_what_does_not_fit_in_memory_is_on_disk(bench: Bench) -> None:
    with bench.engine(max_loras=4, num_adapters=8, num_in_memory=4) as engine:
        assert any(info.location == "DISK" for info in engine.loras.inventory.describe())
        hits = engine.loras.stats.disk.hits
        bench.serve(engine, [bench.request(task, 5, 3) for task in range(8)], num_clients=4)
        assert engine.loras.stats.disk.hits > hits


def test_alike_steps_have_one_adapter_of_each_rank_of_however_many(bench: Bench) -> None:
    one_of_each = sum(bench.adapter(task).pages.nbytes for task in range(len(RANKS)))
    with bench.engine(max_loras=8, num_adapters=12) as engine:
        for population in (5, 12):
            assert throughput_run(bench, engine, "alike", population, 8).bytes_per_step == one_of_each


def test_the_way_in_is_measured_more_often_than_there_are_adapters(bench: Bench, tmp_path: Path) -> None:
    rows = way_in_rows(Setting(save_tiny_llama(tmp_path / "model"), bench, rounds=2, num_requests=1))
    assert [row.what for row in rows] == [
        "way in: plain copy",
        "way in: pack",
        "way in: insert",
        "way in: pack and insert, of a plain copy's speed",
    ]
    assert all(row.value > 0 for row in rows)


def test_pauses_are_compared_with_a_quiet_engine_of_the_same_kind(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_adapters, "PLACES", 4)
    rows = {row.what: row for row in pause_rows(Setting(tmp_path, bench, rounds=1, num_requests=1))}
    ratios = [row.what for row in rows.values() if row.goal]
    assert ratios == [f"pauses, with {what}: p99 against quiet" for what in ("uploads", "fetches", "reads")]
    assert all(row.value > 0 for row in rows.values())


def test_the_throughput_goes_into_its_table_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(PERFORMANCE.read_text())
    monkeypatch.setattr(bench_adapters, "PERFORMANCE", page)
    monkeypatch.setattr(bench_adapters, "write_plots", lambda _: None)
    rows = [
        Row("throughput, mixed: 5 adapters", 2513.4, "tokens/s"),
        Row("throughput, mixed: 2000 against 5", 0.911, "x", ">= 0.95", False),
    ]

    write_throughput_table(rows, "By a test.")

    assert read_table(page, "adapters throughput").splitlines() == [
        "| | 5 adapters | 2000 against 5 (goal >= 0.95) |",
        "| --- | ---: | ---: |",
        "| throughput, mixed | 2,513 tokens/s | 0.911 x, missed |",
        "",
        "By a test.",
    ]


@pytest.mark.long(reason="loads the default model twice")
def test_activated_and_plain_adapters_are_asked_in_turn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, default_model_dir: Path
) -> None:
    asked: list[int | None] = []
    serve = bench.serve

    def note(engine: Engine, requests: list[GenerationRequest], num_clients: int) -> list[list[float]]:
        asked.extend(request.lora_task_id for request in requests)
        return serve(engine, requests, num_clients)

    monkeypatch.setattr(bench, "serve", note)
    monkeypatch.setattr(bench_adapters, "_CONVERSATIONS", {40: 1.0})
    monkeypatch.setattr(bench_adapters, "_NUM_JUDGES", 2)
    rows = activated_rows(Setting(default_model_dir, bench, rounds=1, num_requests=1))
    assert asked == [0, 2, 1, 3]
    assert [row.what for row in rows] == [
        *(f"activated, 40: first token, {kind}" for kind in ("activated", "plain", "PEFT")),
        *(f"activated, 40: all eight, {kind}" for kind in ("activated", "plain", "PEFT")),
        "activated, 40: plain against activated",
    ]
    assert all(row.value > 0 for row in rows)


@pytest.mark.long(reason="loads the default model")
def test_each_kind_has_as_many_adapters_as_requests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, default_model_dir: Path
) -> None:
    asked: list[int | None] = []
    serve = bench.serve

    def note(engine: Engine, requests: list[GenerationRequest], num_clients: int) -> list[list[float]]:
        asked.extend(request.lora_task_id for request in requests)
        kinds = [None if task is None else engine.loras.inventory.info(task).kinds for task in asked]
        assert kinds[:2] == [None, None]
        assert len({*kinds[2:]}) == min(4, len(kinds) // 2 - 1), "rank 32 and sets are LoRA as well"
        return serve(engine, requests, num_clients)

    monkeypatch.setattr(bench, "serve", note)
    monkeypatch.setattr(bench_adapters, "_NUM_ROWS", 2)
    rows = kinds_rows(Setting(default_model_dir, bench, rounds=1, num_requests=1))
    assert asked == [None, None, *range(2, 14)]
    assert [row.what for row in rows[:3]] == ["kinds: base", "kinds: plain", "kinds: token rows"]
    assert all(row.value > 0 for row in rows if "head, time" not in row.what)
