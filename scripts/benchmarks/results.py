"""The results of a benchmark: rows of one number each, as a table, as CSV and as a page's table."""

from __future__ import annotations

import csv
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table

from marked_tables import figure, markdown_table

_TABLE_WIDTH = 100
"""Columns of text that a table needs: wrapped, its figures are cut."""


@dataclass(frozen=True)
class Row:
    """One line of the result. goal: as text, empty if there is none; is_met: None without one."""

    what: str
    value: float
    unit: str
    goal: str = ""
    is_met: bool | None = None

    @property
    def cell(self) -> str:
        """`0.911 x, missed`: the figure as a page has it; a figure that misses its goal says so."""
        return f"{figure(self.value)} {self.unit}{', missed' if self.is_met is False else ''}"


def at_least(what: str, value: float, unit: str, goal: float | None) -> Row:
    return Row(what, value, unit) if goal is None else Row(what, value, unit, f">= {goal:g}", value >= goal)


def at_most(what: str, value: float, unit: str, goal: float | None) -> Row:
    return Row(what, value, unit) if goal is None else Row(what, value, unit, f"<= {goal:g}", value <= goal)


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def threads_title(environment: Mapping[str, str] = os.environ) -> str:
    """The number of CPU threads, and OpenMP's settings of how they wait for each other."""
    choices = [f"{name}={environment[name]}" for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in environment]
    return ", ".join([f"{torch.get_num_threads()} threads", *choices])


def report(rows: Sequence[Row], title: str, output: Path, name: str, console: Console) -> None:
    """Print a line a row, and leave `NAME.csv` in the folder `output`."""
    table = Table(Column("what", no_wrap=True), Column("value", justify="right"), "unit", "goal", "met", title=title)
    for row in rows:
        met = "" if row.is_met is None else "yes" if row.is_met else "[red]no"
        table.add_row(row.what, f"{row.value:,.2f}", row.unit, row.goal, met)
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(table)
    output.mkdir(parents=True, exist_ok=True)
    with (output / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Row))
        writer.writerows(map(astuple, rows))
    console.print(f"wrote {output}/{name}.csv; load {os.getloadavg()[0]:.1f}", highlight=False, soft_wrap=True)


def measures_table(rows: Sequence[Row]) -> str:
    """A row for each subject of results named `SUBJECT: MEASURE` or `SUBJECT against OTHER`, a column for each measure.

    A measure's goal stands in its heading.
    """
    subjects: dict[str, dict[str, str]] = {}
    goals: dict[str, str] = {}
    for row in rows:
        named = re.fullmatch(r"(.+?)(?:: | (?=against ))(.+)", row.what)
        assert named is not None, f"{row.what} names no measure"
        subjects.setdefault(named[1], {})[named[2]] = row.cell
        goals[named[2]] = f" (goal {row.goal})" if row.goal else goals.get(named[2], "")
    columns = ["", *(f"{measure}{goal}" for measure, goal in goals.items())]
    return markdown_table(
        columns, ([name, *(cells.get(each, "") for each in goals)] for name, cells in subjects.items())
    )
