"""What is told of whole steps: each against its limit and its goal, with the parts that take any time."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path

from rich.console import Console

from benchmarks.step_results import TABLE_WIDTH, StepResult, render_steps, write_steps

STEPS = (
    StepResult(
        "decode", 0.030, limit=0.020, max_seconds=0.025, parts={"linears": 0.02, "lora": 0.0, "attention": 0.011}
    ),
    StepResult("overhead", 0.001, limit=None, max_seconds=0.002, parts={"batch": 0.001}),
)


def test_a_step_is_one_line_of_the_table() -> None:
    console = Console(file=StringIO(), width=TABLE_WIDTH)
    with console.capture() as capture:
        console.print(render_steps(STEPS, "title"))
    lines = [line.split() for line in capture.get().splitlines()]
    assert ["decode", "30.00", "20.00", "1.50x", "25.00", "no", "20.00", "11.00"] in lines
    assert ["overhead", "1.00", "2.00", "yes", "1.00"] in lines


def test_a_run_leaves_a_table_and_a_plot(tmp_path: Path) -> None:
    write_steps(STEPS, tmp_path, "steps")
    with (tmp_path / "steps.csv").open() as file:
        decode, overhead = csv.DictReader(file)
    assert decode == {
        "what": "decode",
        "step": "30.00",
        "limit": "20.00",
        "goal": "25.00",
        "linears": "20.00",
        "attention": "11.00",
        "batch": "",
    }
    assert overhead["limit"] == overhead["linears"] == ""
    assert (tmp_path / "steps.png").stat().st_size > 1000
