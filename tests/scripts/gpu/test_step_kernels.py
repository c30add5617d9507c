"""The arithmetic of traces, on traces made by hand in the form that a GPU's have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.machine_limits import Limits
from gpu import step_kernels
from gpu.machine import Row
from gpu.model_steps import TINY, Sizes, Storage, Workbench
from gpu.step_kernels import Launch, Work, read_trace, rows_of_a_trace, work_of_a_step
from multilora_kernels import interpreter

LIMITS = Limits(bandwidth=1e12, peak=1e15)
WORK = [
    Work("linears", r"nvjet|splitK", [("qkv", 6e6), ("o", 2e6), ("qkv", 6e6), ("o", 2e6), ("head", 9e6)]),
    Work("attention", r"decode_kernel", [("attention", 1e6)] * 2),
    Work("adapters", r"shrink_kernel", [("qkv", 1e6)] * 2),
]


def kernel(name: str, ts: float, dur: float, stream: int = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "tid": stream, "args": args}


def rows_of(events: Sequence[dict[str, Any]], by_clock: float, processors: Any = None) -> dict[str, Row]:
    launches = read_trace({"traceEvents": events}, {"kernel"})
    rows = rows_of_a_trace(launches, WORK, LIMITS, processors, by_clock)
    assert len({row.what for row in rows}) == len(rows)
    return {row.what: row for row in rows}


STEP = [
    kernel("nvjet_a", 100.0, 10.0),
    kernel("decode_kernel", 111.0, 5.0),
    kernel("nvjet_b", 116.0, 4.0),
    kernel("nvjet_a", 121.0, 10.0),
    # On a second stream, beside the product before it and beyond its end.
    kernel("strange_kernel", 125.0, 10.0, stream=9),
    kernel("decode_kernel", 136.0, 5.0),
    # A dependent launch begins before the one before it has ended.
    kernel("nvjet_b", 140.0, 4.0),
    kernel("nvjet_c", 144.0, 16.0),
]


def test_kernels_at_their_places_less_what_ran_at_once_and_gaps_are_the_step() -> None:
    other = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 90.0, "dur": 100.0, "tid": 1},
        {"ph": "i", "name": "Iteration Start", "ts": 0.0},
    ]
    rows = rows_of([*reversed(STEP), *other], by_clock=61.0)
    assert rows["sum of kernels and gaps"].value == pytest.approx(60.0)
    assert "trust the clock" not in rows["sum of kernels and gaps"].note
    parts = ["qkv, nvjet_a", "o, nvjet_b", "head, nvjet_c", "attention, decode_kernel", "strange_kernel"]
    parts += ["gaps between kernels", "less what ran at once"]
    assert sum(rows[name].value or 0.0 for name in parts) == pytest.approx(60.0)
    assert rows["gaps between kernels"].value == pytest.approx(1 + 1 + 1)
    assert rows["gaps between kernels"].note == "5.0% of the step; by the clock 4.0 us"
    assert rows["less what ran at once"].value == pytest.approx(-6 - 1)
    # 12 MB in 20 us of 1 TB/s.
    assert rows["qkv, nvjet_a"].of_limit == pytest.approx(0.6)
    assert "2 launches" in rows["qkv, nvjet_a"].note
    assert rows["all of linears"].value == pytest.approx(44.0)
    assert rows["all of linears"].of_limit == pytest.approx(25 / 44)
    assert "all of adapters" not in rows


def test_a_kernel_that_the_table_does_not_know_is_named() -> None:
    row = rows_of(STEP, 60.0)["strange_kernel"]
    assert (row.value, row.of_limit) == (10.0, None)
    assert "its bytes are not known" in row.note


def test_a_trace_that_slows_the_step_down_says_so() -> None:
    assert "+9.1% to the clock: the trace changes the step" in rows_of(STEP, 55.0)["sum of kernels and gaps"].note


def test_where_a_linear_is_two_kernels_their_bytes_are_right_together_alone() -> None:
    rows = rows_of([*STEP, kernel("splitKreduce_kernel", 160.0, 6.0)], 66.0)
    assert rows["all of linears"].of_limit == pytest.approx(25 / 50)
    assert "qkv, nvjet_a" not in rows
    assert "some of linears, splitKreduce_kernel" in rows


def test_only_whole_replays_count() -> None:
    run = [Launch("a", 0, 1), Launch("b", 1, 1), Launch("a", 2, 1)]
    assert step_kernels.divided(3 * run, 3) == 3 * [run]
    assert step_kernels.divided([*3 * run[:2], *run], 3) == step_kernels.divided([], 3) == []
    assert step_kernels.divided([run[0], run[0], run[1], run[0], run[1], run[1]], 3) == []


def test_waves_are_programs_over_those_that_fit_at_once() -> None:
    # As of an H200: 132 processors, each of 65,536 registers, 2,048 threads and 228 KiB.
    processors = step_kernels._Processors(132, 1 << 16, 2048, 228 << 10)

    def waves(programs: int, threads: int, registers: int, shared_bytes: int = 0) -> float:
        return processors.waves(Launch("", 0, 1, programs, threads, registers, shared_bytes))

    assert waves(21504, 128, 128) == pytest.approx(21504 / (132 * 4))
    assert waves(132, 128, 32) == pytest.approx(1 / 16)
    # 33 registers are taken as 40.
    assert waves(132, 128, 33) == pytest.approx(1 / 12)
    assert waves(132, 1024, 16) == pytest.approx(1 / 2)
    assert waves(132, 32, 16, 100 << 10) == pytest.approx(1 / 2)
    assert waves(132, 32, 16) == pytest.approx(1 / 32)
    rows = rows_of(
        [kernel("k", 0.0, 1.0, grid=[264, 4, 1], block=[128, 1, 1], **{"registers per thread": 128})], 1, processors
    )
    assert rows["k"].note.startswith("1 launches, 128 registers, 1,056 programs in 2.0 waves")


def test_the_bytes_of_a_step_are_those_of_its_weights_keys_and_adapters() -> None:
    """Beside activations, which are few: against the workbench's own sum."""
    bench = Workbench(TINY, Sizes((1, 3), 700, 5), Storage(torch.bfloat16, torch.bfloat16), torch.device("cpu"))
    for adapters in (0, 1, 3):
        work = work_of_a_step(bench, 3, adapters)
        # In place of shrink and expand, and with both their work.
        num_bytes = sum(size for each in work if "update" not in each.pattern for _, size in each.launches)
        expected, _ = bench.decode_work(3, adapters)
        assert expected < num_bytes < 1.15 * expected


def test_rows_by_themselves_have_no_bytes_of_an_activation_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Workbench(TINY, Sizes((3,), 700, 5), Storage(torch.bfloat16, torch.bfloat16), torch.device("cpu"))
    apart = {work.pattern: dict(work.launches) for work in work_of_a_step(bench, 3, 3)}
    monkeypatch.setattr(interpreter, "IS_INTERPRETED", True)
    for num_adapters in (0, 3):
        found = {work.pattern: dict(work.launches) for work in work_of_a_step(bench, 3, num_adapters)}
        assert bool(found["^activation_kernel"]) == (num_adapters == 0)
    # As many activations as gates are written, in place of gates and ups.
    activations = 2 * 3 * TINY.intermediate_size
    expands = r"expand\w*_kernel"
    assert apart[expands].pop("gate_up") - found[expands].pop("gate_up") == activations
    assert apart[expands] == found[expands]
