"""The engine's benchmark measures what it names: whole steps, all of their parts, and limits that can be recomputed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.bench_engine import (
    MIXED,
    adapter_rows,
    overhead_results,
    peft_rows,
    prefill_rows,
    prefix_rows,
    save_tiny_model,
)
from benchmarks.bench_rows import Row
from benchmarks.decode_steps import BATCHES, bfloat16_results, decode_results
from benchmarks.engine_bench import Bench, Work
from benchmarks.machine_limits import Limits
from benchmarks.plain_loops import PlainLoops
from benchmarks.step_parts import PARTS, Stopwatch, timed_parts
from benchmarks.step_results import StepResult


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


def test_the_parts_of_a_step_are_all_timed_and_are_the_whole_step(bench: Bench) -> None:
    with bench.batch(2, prompt_tokens=3), timed_parts() as stopwatch:
        (seconds,) = bench.step_seconds(1)
    assert set(stopwatch.seconds) == set(PARTS)
    assert 0 < sum(stopwatch.seconds.values()) <= seconds
    measured = dict(stopwatch.seconds)
    with bench.batch(1, prompt_tokens=3):
        bench.step_seconds(1)
    assert stopwatch.seconds == measured, "it should have stopped"


def test_a_part_does_not_count_the_timed_parts_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.step_parts.time.perf_counter", lambda: now[0])
    stopwatch = Stopwatch()

    def pass_seconds(seconds: float) -> None:
        now[0] += seconds

    inner = stopwatch.timed("inner", pass_seconds)

    def outer() -> None:
        inner(3)
        pass_seconds(4)
        inner(5)

    stopwatch.timed("outer", outer)()
    assert stopwatch.seconds == {"inner": 8, "outer": 4}


def test_every_part_of_the_benchmark_reports_positive_figures(bench: Bench) -> None:
    results = decode_results({"float32": bench, "bfloat16": bench}, torch.float32, rounds=1, context=8, num_steps=1)
    results += prefill_rows({"float32": bench}, rounds=1, num_tokens=16)
    results += adapter_rows(bench, context=4, rounds=1, num_steps=1)
    results += overhead_results(rounds=1, num_steps=1, num_sequences=4)
    steps = {step.what: step for step in results if isinstance(step, StepResult)}
    values = {row.what: row.value for row in results if isinstance(row, Row)}
    assert len(steps) + len(values) == len(results)
    for weights, n in itertools.product(("float32", "bfloat16"), BATCHES):
        step = steps[f"decode {n}, {weights}"]
        assert step.limit is not None
        assert step.seconds > step.limit > 0
        assert step.parts["linears"] > 0
    assert steps["decode 1, bfloat16"].limit < steps["decode 1, float32"].limit
    overhead = steps["overhead of 4, mixed sampling"]
    assert overhead.seconds > overhead.parts["batch"] > 0
    assert "linears" not in overhead.parts
    assert values["prefill 16, float32: tokens"] > 0
    assert values["adapters: 16 different"] > 0
    assert bench.engine.stats.num_cached_adapters == 0


def test_steps_in_bfloat16_are_measured_against_products_of_bfloat16_where_there_are_any(bench: Bench) -> None:
    checkpoints = {"bfloat16": Path(bench.engine.info.model_path)}
    options = {"num_threads": 1, "kv_cache_memory_bytes": 8 << 20}
    results = bfloat16_results(checkpoints, rounds=1, context=4, num_steps=1, **options)
    rows = {row.what for row in results if isinstance(row, Row)}
    products = "bfloat16" if PlainLoops().operations(torch.bfloat16) else "float32"
    assert rows == {"machine: read bandwidth", f"machine: {products} products"}
    steps = {step.what: step for step in results if isinstance(step, StepResult)}
    assert set(steps) == {f"decode {n}, bfloat16 in bfloat16" for n in BATCHES}
    assert all(step.seconds > step.limit > 0 for step in steps.values())


def test_the_engine_and_peft_are_asked_for_the_same_answers(bench: Bench) -> None:
    values = {row.what: row.value for row in peft_rows(bench, rounds=1, prompt_tokens=5, output_tokens=4)}
    assert values["peft: answers that are the same"] == 1
    assert values["peft: engine"] > 0
    assert values["peft: transformers + PEFT"] > 0
    assert bench.engine.stats.num_cached_adapters == 0
