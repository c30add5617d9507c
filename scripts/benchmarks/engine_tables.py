"""The table of docs/performance.md that `bench_engine --part decode --docs` writes.

A figure that misses its goal says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.bench_rows import Row
from benchmarks.step_results import StepResult
from marked_tables import figure, write_table
from plots import DOCS, write_plots

PAGE = DOCS / "performance.md"
_PREFIX = "decode "
_MACHINE = "machine: "
TABLE = "steps"
Results = Sequence[Row | StepResult]


def write_steps_table(results: Results, source: str) -> None:
    """Write the results of the part `decode` into the page, and draw the page's plots anew.

    source: the sentence that tells where the figures are from.
    """
    told = " ".join([source, machine_limits(results), *missed(results)])
    write_table(PAGE, TABLE, steps_table(results), told)
    write_plots(PAGE)


def steps_table(results: Results) -> str:
    """A row for each number of sequences; for each kind of weights the time of a step, and its multiple of the limit.

    The plot of the page finds the columns by this order.
    """
    steps = {step.what.removeprefix(_PREFIX): step for step in results if isinstance(step, StepResult)}
    keys = [name.split(", ", 1) for name in steps]
    counts = sorted({int(count) for count, _ in keys})
    weights = list(dict.fromkeys(kind for _, kind in keys))
    columns = [heading for kind in weights for heading in (_heading(kind), f"{_heading(kind)}, of the limit")]
    lines = [f"| sequences | {' | '.join(columns)} |", f"| ---: |{' ---: |' * len(columns)}"]
    for count in counts:
        cells = [cell for kind in weights for cell in _cells(steps[f"{count}, {kind}"])]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def machine_limits(results: Results) -> str:
    """A sentence of the limits that were measured meanwhile."""
    limits = [row for row in results if isinstance(row, Row) and row.what.startswith(_MACHINE)]
    told = ", ".join(f"{row.what.removeprefix(_MACHINE)} {figure(row.value)} {row.unit}" for row in limits)
    return f"The machine meanwhile: {told}."


def missed(results: Results) -> list[str]:
    """A sentence of the rows that miss their goals and have no cell in the table of steps; none without such rows."""
    rows = [row for row in results if isinstance(row, Row) and row.is_met is False]
    told = "; ".join(f"{row.what} {figure(row.value)} {row.unit} (goal {row.goal})" for row in rows)
    return [f"Missed: {told}."] if told else []


def measures_table(results: Results) -> str:
    """A row for each subject of results named `SUBJECT: MEASURE` or `SUBJECT against OTHER`, a column for each measure.

    A measure's goal stands in its heading.
    """
    rows: dict[str, dict[str, str]] = {}
    goals: dict[str, str] = {}
    for result in results:
        assert isinstance(result, Row), f"{result.what} is a step"
        named = re.fullmatch(r"(.+?)(?:: | (?=against ))(.+)", result.what)
        assert named is not None, f"{result.what} names no measure"
        rows.setdefault(named[1], {})[named[2]] = f"{figure(result.value)} {result.unit}{_verdict(result)}"
        goals[named[2]] = f" (goal {result.goal})" if result.goal else goals.get(named[2], "")
    lines = ["".join(["| |", *(f" {measure}{goal} |" for measure, goal in goals.items())])]
    lines.append(f"| --- |{' ---: |' * len(goals)}")
    for subject, cells in rows.items():
        lines.append(f"| {subject} | {' | '.join(cells.get(measure, '') for measure in goals)} |")
    return "\n".join(lines) + "\n"


def _heading(weights: str) -> str:
    """Weights in bfloat16 are beside computing in float32; a scheme's name says that it is one of weights."""
    return f"weights in {weights}" if weights in ("bfloat16", "float16") else weights


def _cells(step: StepResult) -> tuple[str, str]:
    assert step.limit is not None, f"{step.what} has a limit"
    return _milliseconds(step.seconds), f"{step.seconds / step.limit:.2f}x{_verdict(step)}"


def _verdict(result: Row | StepResult) -> str:
    return ", missed" if result.is_met is False else ""


def _milliseconds(seconds: float) -> str:
    return f"{figure(seconds * 1e3)} ms"
