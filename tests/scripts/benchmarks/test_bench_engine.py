"""The engine's benchmark measures what it names: whole steps, all of their parts, and limits that can be recomputed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from benchmarks import bench_engine
from benchmarks.bench_engine import (
    BATCHES,
    MIXED,
    adapter_rows,
    bfloat16_rows,
    decode_rows,
    general_rows,
    model_seconds,
    overhead_rows,
    prefill_rows,
    prefix_rows,
    save_tiny_model,
    steps_table,
    write_steps_table,
)
from benchmarks.engine_bench import Bench, Work
from benchmarks.machine_limits import Limits, PlainLoops
from benchmarks.results import Row, at_least, at_most
from marked_tables import read_cells, read_table
from plots import PERFORMANCE, draw_steps

WEIGHTS = ("float32", "bfloat16", "w8a16", "w4a16")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(save_tiny_model(tmp_path_factory.mktemp("tiny")), num_threads=1, kv_cache_memory_bytes=8 << 20)
    yield bench
    bench.close()


def test_the_limit_of_a_step_is_that_of_the_weights_and_keys_it_reads_or_of_its_flops(bench: Bench) -> None:
    model = AutoModelForCausalLM.from_pretrained(bench.engine.info.model_path)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    work = Work(bench.model, torch.float32, torch.float32)
    kv_bytes = 2 * 4 * bench.model.kv_size
    reads = work.decode_seconds([5, 7], Limits(bandwidth=1, peak=math.inf))
    assert reads == 4 * matrices + 12 * kv_bytes
    halved = Work(bench.model, torch.float32, torch.bfloat16)
    assert halved.decode_seconds([5, 7], Limits(bandwidth=1, peak=math.inf)) == 2 * matrices + 12 * kv_bytes
    attention = 2 * 2 * bench.model.q_size
    multiplies = work.decode_seconds([5, 7], Limits(bandwidth=math.inf, peak=1))
    assert multiplies == 2 * 2 * matrices + 12 * attention
    head = bench.model.hidden_size * bench.model.vocab_size
    assert work.prefill_flops(3) == 3 * 2 * (matrices - head) + 2 * head + (1 + 2 + 3) * attention


def test_a_batch_decodes_from_the_start_and_leaves_nothing_behind(bench: Bench) -> None:
    with bench.batch(3, prompt_tokens=9, sampling=MIXED) as request_ids:
        assert [output.request_id for output in bench.engine.step()] == request_ids
        assert len(bench.step_seconds(4)) == 4
    assert not bench.engine.has_work
    assert bench.engine.stats.num_free_blocks == bench.engine.stats.num_blocks


def test_of_two_prompts_that_begin_alike_the_second_finds_the_prefix(bench: Bench) -> None:
    before = bench.engine.stats.prefix_cache.hit_tokens
    rows = prefix_rows(bench, rounds=2, num_shared=48, num_own=8)
    assert bench.engine.stats.prefix_cache.hit_tokens - before == 2 * 48
    assert all(row.value > 0 for row in rows)
    assert not bench.engine.has_work


def test_a_models_calls_are_timed_as_long_as_they_are_asked_for(bench: Bench) -> None:
    with bench.batch(2, prompt_tokens=3), model_seconds() as seconds:
        (step,) = bench.step_seconds(1)
    assert seconds
    assert 0 < sum(seconds) < step
    measured = list(seconds)
    with bench.batch(1, prompt_tokens=3):
        bench.step_seconds(1)
    assert seconds == measured, "it should have stopped"


def test_transformers_modules_are_measured_beside_our_layers_and_peft(bench: Bench) -> None:
    path, options = Path(bench.engine.info.model_path), {"num_threads": 1, "kv_cache_memory_bytes": 8 << 20}
    rows = {row.what: row for row in general_rows(path, rounds=1, context=4, num_steps=1, **options)}
    assert [row.goal for row in rows.values() if row.goal] == [">= 0.5", ">= 0.8", ">= 2"]
    assert all(row.value > 0 for row in rows.values())
    times = rows["general: 16 different adapters"].value / rows["general: the same by transformers with PEFT"].value
    assert rows["general: 16 different adapters, times transformers with PEFT"].value == pytest.approx(times)


def test_every_part_of_the_benchmark_reports_positive_figures(bench: Bench) -> None:
    results = decode_rows({"float32": bench, "bfloat16": bench}, torch.float32, rounds=1, context=8, num_steps=1)
    results += prefill_rows({"float32": bench}, rounds=1, num_tokens=16)
    results += adapter_rows(bench, context=4, rounds=1, num_steps=1)
    results += overhead_rows(rounds=1, num_steps=1, num_sequences=4)
    values = {row.what: row.value for row in results}
    assert len(values) == len(results)
    for weights, n in itertools.product(("float32", "bfloat16"), BATCHES):
        assert values[f"decode {n}, {weights}"] > 0
        assert values[f"decode {n}, {weights}: of the limit"] > 1
    assert values["overhead of 4, mixed sampling"] > 0
    assert values["prefill 16, float32: tokens"] > 0
    assert values["adapters: 16 different"] > 0
    assert bench.engine.stats.num_cached_adapters == 0


def test_steps_in_bfloat16_are_measured_against_products_of_bfloat16_where_there_are_any(bench: Bench) -> None:
    checkpoints = {"bfloat16": Path(bench.engine.info.model_path)}
    options = {"num_threads": 1, "kv_cache_memory_bytes": 8 << 20}
    results = bfloat16_rows(checkpoints, rounds=1, context=4, num_steps=1, **options)
    products = "bfloat16" if PlainLoops().operations(torch.bfloat16) else "float32"
    machine = {"machine: read bandwidth", f"machine: {products} products"}
    steps = {f"decode {n}, bfloat16 in bfloat16{which}" for n in BATCHES for which in ("", ": of the limit")}
    assert {row.what for row in results} == machine | steps
    assert all(row.value > 0 for row in results)


def decode(*counts: int) -> list[Row]:
    """Results in the order of the benchmark: a step of n sequences takes n ms, 1.76 times the limit."""
    return [
        Row("machine: read bandwidth", 28.04, "GB/s"),
        Row("machine: float32 products", 340.2, "GFLOP/s"),
        *(
            row
            for weights in WEIGHTS
            for n in counts
            for row in (
                Row(f"decode {n}, {weights}", n, "ms"),
                at_most(f"decode {n}, {weights}: of the limit", 1.76, "x", {16: 1.5}.get(n)),
            )
        ),
        at_least("decode 1, w4a16 against float32", 1.0, "x", 3),
    ]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the page, whose plots are not drawn."""
    copy = tmp_path / "page.md"
    copy.write_text(PERFORMANCE.read_text())
    monkeypatch.setattr(bench_engine, "PERFORMANCE", copy)
    monkeypatch.setattr(bench_engine, "write_plots", lambda _: None)
    return copy


def test_a_step_is_told_by_its_time_and_its_multiple_of_the_limit_and_one_that_misses_its_goal_says_so() -> None:
    lines = steps_table(decode(1, 16)).splitlines()
    assert lines[0] == read_table(PERFORMANCE, "steps").splitlines()[0]
    assert lines[2:] == ["| 1 |" + " 1 ms | 1.76x |" * 4, "| 16 |" + " 16 ms | 1.76x, missed |" * 4]


def test_the_table_is_told_with_the_limits_of_the_machine_and_can_be_drawn(page: Path) -> None:
    write_steps_table(decode(1, 8, 16, 32), "By a test.")
    assert read_table(page, "steps").endswith(
        "\n\nBy a test. The machine meanwhile: read bandwidth 28 GB/s, float32 products 340 GFLOP/s. "
        "Missed: decode 1, w4a16 against float32 1 x, missed (goal >= 3).\n"
    )
    axes = Figure().subplots()
    draw_steps(axes, read_cells(page, "steps"))
    times = [line for line in axes.lines if line.get_label() in (*WEIGHTS, "weights in bfloat16")]
    assert [list(line.get_ydata()) for line in times] == [[1, 8, 16, 32]] * 4
