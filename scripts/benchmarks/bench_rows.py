"""The reports of the engine's benchmarks: rows of one number each, as a table, as CSV and as a plot."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Column, Table

TABLE_WIDTH = 100
"""Columns of text that the table needs: wrapped, its figures are cut."""


@dataclass(frozen=True)
class Row:
    """One line of the result. goal: as text, empty if there is none; is_met: None without one."""

    what: str
    value: float
    unit: str
    goal: str = ""
    is_met: bool | None = None


def threads_title(environment: Mapping[str, str] = os.environ) -> str:
    """The number of CPU threads, and OpenMP's settings of how they wait for each other."""
    choices = [f"{name}={environment[name]}" for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in environment]
    return ", ".join([f"{torch.get_num_threads()} threads", *choices])


def render(rows: Sequence[Row], title: str) -> Table:
    """One line a row."""
    table = Table(Column("what", no_wrap=True), Column("value", justify="right"), "unit", "goal", "met", title=title)
    for row in rows:
        met = "" if row.is_met is None else "yes" if row.is_met else "[red]no"
        table.add_row(row.what, f"{row.value:,.2f}", row.unit, row.goal, met)
    return table


def write_results(rows: Sequence[Row], output: Path, name: str) -> None:
    """`NAME.csv` and `NAME.png` in a folder; one panel for each unit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    output.mkdir(parents=True, exist_ok=True)
    with (output / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("what", "value", "unit", "goal", "is_met"))
        writer.writerows((row.what, row.value, row.unit, row.goal, row.is_met) for row in rows)
    panels = {unit: [row for row in rows if row.unit == unit] for unit in dict.fromkeys(row.unit for row in rows)}
    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(9, 1 + 0.4 * len(rows)),
        height_ratios=[1 + len(p) for p in panels.values()],
        squeeze=False,
    )
    for axis, (unit, panel) in zip(axes.flat, panels.items(), strict=True):
        bars = axis.barh([row.what for row in panel], [row.value for row in panel])
        axis.bar_label(bars, fmt="%.2f", padding=3)
        axis.set(xlabel=unit)
        axis.margins(x=0.15)
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(output / f"{name}.png", dpi=150)
