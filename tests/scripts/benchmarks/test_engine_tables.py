"""Tables of the engine's benchmark are those that its page has and its plot reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks import engine_tables
from benchmarks.bench_rows import Row
from benchmarks.engine_tables import PAGE, Results, steps_table, write_tables
from benchmarks.step_results import StepResult
from marked_tables import read_cells, read_table
from plots import draw_steps

WEIGHTS = ("float32", "bfloat16", "w8a16", "w4a16")
PARTS = ("unpacked", "prefill", "prefix", "adapters", "stored", "peft", "overhead")


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
    write_tables({"decode": decode(1, 8, 16, 32)}, "By a test.")
    axes = Figure().subplots()
    draw_steps(axes, read_cells(page, "steps"))
    times = [line for line in axes.lines if line.get_label() in (*WEIGHTS, "weights in bfloat16")]
    assert [list(line.get_ydata()) for line in times] == [[1, 8, 16, 32]] * 4


def test_a_part_writes_its_own_table_and_no_other(page: Path) -> None:
    rows = [
        Row("peft: engine", 216.4, "tokens/s"),
        Row("peft: engine against transformers + PEFT", 7.81, "x", ">= 3", True),
    ]
    write_tables({"peft": rows, "overhead": [StepResult("overhead of 64, greedy", 7.04e-4, None, 2e-3, {})]}, "By me.")

    assert read_table(page, "engine peft").splitlines() == [
        "| measured | | goal |",
        "| --- | ---: | ---: |",
        "| peft: engine | 216 tokens/s | |",
        "| peft: engine against transformers + PEFT | 7.81 x | >= 3 |",
        "",
        "By me.",
    ]
    assert "| overhead of 64, greedy | 0.704 ms | <= 2 ms |" in read_table(page, "engine overhead")
    assert read_table(page, "steps") == read_table(PAGE, "steps")


def test_the_limits_of_the_machine_are_told_with_the_steps(page: Path) -> None:
    write_tables({"decode": decode(1)}, "By a test.")
    assert read_table(page, "steps").endswith(
        "\n\nBy a test. The machine meanwhile: read bandwidth 28 GB/s, float32 products 340 GFLOP/s. "
        "Missed: decode 1, w4a16 against float32 1 x (goal >= 3).\n"
    )


def test_steps_in_bfloat16_have_a_table_of_their_own(page: Path) -> None:
    steps = [
        StepResult(f"decode {n}, w4a16 in bfloat16", n * 1e-3, limit=n * 0.5e-3, max_seconds=None, parts={})
        for n in (1, 8)
    ]
    write_tables({"bfloat16": [Row("machine: bfloat16 products", 450.1, "GFLOP/s"), *steps]}, "By a test.")
    assert read_table(page, "steps in bfloat16").splitlines() == [
        "| sequences | w4a16 in bfloat16 | w4a16 in bfloat16, of the limit |",
        "| ---: | ---: | ---: |",
        "| 1 | 1 ms | 2.00x |",
        "| 8 | 8 ms | 2.00x |",
        "",
        "By a test. The machine meanwhile: bfloat16 products 450 GFLOP/s.",
    ]
    assert read_table(page, "steps") == read_table(PAGE, "steps")


def test_prompts_have_a_row_for_each_kind_of_weights(page: Path) -> None:
    rows = [
        Row("prefill 2048, float32: time", 3218.1, "ms"),
        Row("prefill 2048, float32: of the matrix products' rate", 0.871, "x", ">= 0.75", True),
        Row("prefill 2048, w8a16: time", 3151.2, "ms"),
        Row("prefill 2048, w8a16 against float32", 1.02, "x", ">= 1", True),
    ]
    write_tables({"prefill": rows}, "By a test.")
    assert read_table(page, "engine prefill").splitlines()[:4] == [
        "| | time | of the matrix products' rate (goal >= 0.75) | against float32 (goal >= 1) |",
        "| --- | ---: | ---: | ---: |",
        "| prefill 2048, float32 | 3,218 ms | 0.871 x |  |",
        "| prefill 2048, w8a16 | 3,151 ms |  | 1.02 x |",
    ]


def test_what_auto_goes_by_has_a_table_of_its_own_by_weights_and_rows(page: Path) -> None:
    rows = [
        Row("decode 1, w8a16, auto against float32", 2.4, "x", ">= 1", True),
        *(
            Row(f"choice of w8a16, {shape}: floats at {n} rows", n / 8, "x")
            for shape in ("9 x 5", "7 x 2")
            for n in (4, 16)
        ),
    ]
    write_tables({"unpacked": rows}, "By a test.")
    assert read_table(page, "engine choices").splitlines()[:4] == [
        "| | floats at 4 rows | floats at 16 rows |",
        "| --- | ---: | ---: |",
        "| choice of w8a16, 9 x 5 | 0.5 x | 2 x |",
        "| choice of w8a16, 7 x 2 | 0.5 x | 2 x |",
    ]
    assert read_table(page, "engine unpacked").splitlines()[2:4] == ["| decode 1, w8a16, auto | 2.4 x |", ""]


def test_every_part_has_its_place_on_the_page(page: Path) -> None:
    write_tables({part: [Row(f"{part}: time", 2003.4, "ms")] for part in PARTS}, "By a test.")
    for part in PARTS:
        assert "2,003 ms |" in read_table(page, f"engine {part}")


def test_a_figure_that_misses_its_goal_says_so(page: Path) -> None:
    """And its plot reads it as before."""
    slow = [StepResult(f"decode 16, {weights}", 30e-3, 17e-3, 25.5e-3, {}) for weights in WEIGHTS]
    fast = [StepResult(f"decode 1, {weights}", 20e-3, 16e-3, 20e-3, {}) for weights in WEIGHTS]
    results = {
        "decode": slow + fast,
        "overhead": [StepResult("of 64, greedy", 2.1e-3, None, 2e-3, {}), StepResult("mixed", 2e-3, None, 2e-3, {})],
        "peft": [Row("engine", 2.5, "x", ">= 3", False), Row("same", 1, "x", ">= 1", True), Row("rate", 9, "tokens/s")],
        "unpacked": [Row("w4 against float32", 0.888, "x", ">= 1", False), Row("w8 against float32", 1, "x", "", None)],
    }
    write_tables(results, "By a test.")
    assert read_cells(page, "steps")[0]["float32, of the limit"] == "1.25x"
    assert read_cells(page, "steps")[1]["w4a16, of the limit"] == "1.76x, missed"
    assert [row[""] for row in read_cells(page, "engine overhead")] == ["2.1 ms, missed", "2 ms"]
    assert [row[""] for row in read_cells(page, "engine peft")] == ["2.5 x, missed", "1 x", "9 tokens/s"]
    told = [row["against float32 (goal >= 1)"] for row in read_cells(page, "engine unpacked")]
    assert told == ["0.888 x, missed", "1 x"]
    axes = Figure().subplots()
    draw_steps(axes, read_cells(page, "steps"))
    assert [list(line.get_ydata()) for line in axes.lines if line.get_label() == "w4a16"] == [[20, 30]]
