"""Whole steps in a report: one row a step with its parts beside it, as a table and as CSV, and a bar of its parts."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Column, Table

TABLE_WIDTH = 126
"""Columns of text that the table needs: cut, its figures would say nothing."""


@dataclass(frozen=True)
class StepResult:
    """Seconds of one kind of step.

    limit: of the machine, None where the step is not about it. max_seconds: the goal, None without one.
    parts: measured in steps of their own, where the clock costs time too, so that their sum is a little more.
    """

    what: str
    seconds: float
    limit: float | None
    max_seconds: float | None
    parts: Mapping[str, float]

    @property
    def is_met(self) -> bool | None:
        """Whether the step is as fast as it should be; None without a goal."""
        return None if self.max_seconds is None else self.seconds <= self.max_seconds


def render_steps(steps: Sequence[StepResult], title: str) -> Table:
    """One line a step, milliseconds; a column for each part that takes any."""
    parts = _parts(steps)
    columns = ("step", "limit", "of limit", "goal", "met", *parts)
    headings = [Column(name, justify="right") for name in columns]
    table = Table(Column("ms", no_wrap=True), *headings, title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for step in steps:
        over = "" if step.limit is None else f"{step.seconds / step.limit:.2f}x"
        met = "" if step.is_met is None else "yes" if step.is_met else "[red]no"
        figures = (_ms(step.limit), over, _ms(step.max_seconds), met, *(_ms(step.parts.get(part)) for part in parts))
        table.add_row(step.what, _ms(step.seconds), *figures)
    return table


def write_steps(steps: Sequence[StepResult], output: Path, name: str) -> None:
    """`NAME.csv` in milliseconds, and `NAME.png`: bars of the parts; lines mark the step itself and its limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    output.mkdir(parents=True, exist_ok=True)
    parts = _parts(steps)
    with (output / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("what", "step", "limit", "goal", *parts))
        for step in steps:
            figures = (step.seconds, step.limit, step.max_seconds, *(step.parts.get(part) for part in parts))
            writer.writerow((step.what, *map(_ms, figures)))
    figure, axis = pyplot.subplots(figsize=(9, 2 + 0.4 * len(steps)))
    names, left = [step.what for step in steps], [0.0] * len(steps)
    for part in parts:
        widths = [step.parts.get(part, 0.0) * 1e3 for step in steps]
        axis.barh(names, widths, left=left, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    limits = [(place, step.limit * 1e3) for place, step in enumerate(steps) if step.limit is not None]
    marks = {"step": [(place, step.seconds * 1e3) for place, step in enumerate(steps)], "limit": limits}
    for (label, points), color in zip(marks.items(), ("black", "red"), strict=True):
        tops, bottoms = ([place + half for place, _ in points] for half in (-0.45, 0.45))
        axis.vlines([ms for _, ms in points], tops, bottoms, color, label=label)
    axis.set(xlabel="ms")
    axis.invert_yaxis()
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(output / f"{name}.png", dpi=150)


def _parts(steps: Sequence[StepResult]) -> list[str]:
    return list(dict.fromkeys(part for step in steps for part, seconds in step.parts.items() if seconds))


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"
