"""The table of the engine's benchmark is the one that its page has and its plot reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks import engine_tables
from benchmarks.bench_rows import Row
from benchmarks.engine_tables import PAGE, Results, steps_table, write_steps_table
from benchmarks.step_results import StepResult
from marked_tables import read_cells, read_table
from plots import draw_steps

WEIGHTS = ("float32", "bfloat16", "w8a16", "w4a16")


def decode(*counts: int) -> Results:
    """Results in the order of the benchmark: a step of n sequences takes n ms, twice the limit."""
    return [
        Row("machine: read bandwidth", 28.04, "GB/s"),
        Row("machine: float32 products", 340.2, "GFLOP/s"),
        *(
            StepResult(f"decode {n}, {weights}", n * 1e-3, limit=n * 0.5e-3, max_seconds=None, parts={})
            for weights in WEIGHTS
            for n in counts
        ),
        Row("decode 1, w4a16 against float32", 1.0, "x", ">= 3", False),
    ]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the page, whose plots are not drawn."""
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text())
    monkeypatch.setattr(engine_tables, "PAGE", copy)
    monkeypatch.setattr(engine_tables, "write_plots", lambda _: None)
    return copy


def test_a_step_is_told_by_its_time_and_its_multiple_of_the_limit() -> None:
    lines = steps_table(decode(1, 8)).splitlines()
    assert lines[0].startswith("| sequences | float32 | float32, of the limit | weights in bfloat16 | weights in ")
    assert lines[2:] == [f"| {n} |" + f" {n} ms | 2.00x |" * 4 for n in (1, 8)]


def test_the_page_has_the_headings_that_the_benchmark_writes() -> None:
    written = steps_table(decode(1)).splitlines()[0]
    shown = read_table(PAGE, "steps").splitlines()[0]
    assert written.startswith(shown.removesuffix("|"))


def test_the_table_of_all_weights_can_be_drawn(page: Path) -> None:
    write_steps_table(decode(1, 8, 16, 32), "By a test.")
    axes = Figure().subplots()
    draw_steps(axes, read_cells(page, "steps"))
    times = [line for line in axes.lines if line.get_label() in (*WEIGHTS, "weights in bfloat16")]
    assert [list(line.get_ydata()) for line in times] == [[1, 8, 16, 32]] * 4


def test_the_limits_of_the_machine_are_told_with_the_steps(page: Path) -> None:
    write_steps_table(decode(1), "By a test.")
    assert read_table(page, "steps").endswith(
        "\n\nBy a test. The machine meanwhile: read bandwidth 28 GB/s, float32 products 340 GFLOP/s. "
        "Missed: decode 1, w4a16 against float32 1 x (goal >= 3).\n"
    )


def test_a_figure_that_misses_its_goal_says_so(page: Path) -> None:
    """And its plot reads it as before."""
    slow = [StepResult(f"decode 16, {weights}", 30e-3, 17e-3, 25.5e-3, {}) for weights in WEIGHTS]
    fast = [StepResult(f"decode 1, {weights}", 20e-3, 16e-3, 20e-3, {}) for weights in WEIGHTS]
    write_steps_table(slow + fast, "By a test.")
    assert read_cells(page, "steps")[0]["float32, of the limit"] == "1.25x"
    assert read_cells(page, "steps")[1]["w4a16, of the limit"] == "1.76x, missed"
    axes = Figure().subplots()
    draw_steps(axes, read_cells(page, "steps"))
    assert [list(line.get_ydata()) for line in axes.lines if line.get_label() == "w4a16"] == [[20, 30]]
