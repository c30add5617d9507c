"""Draws the plots of the documents from the tables of the documents. Each number is written in a table only."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from marked_tables import read_cells
from repository import REPOSITORY

EPILOG = "Commands that write such a table draw its plot with it. A test holds the plots to the tables."

DOCS = REPOSITORY / "docs"
PERFORMANCE = DOCS / "performance.md"
IMAGES = DOCS / "images"

_COLOURS = {
    "paper": ("#fffffe", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "grid": ("#d0d7de", "#30363d"),
    "first": ("#0b62b0", "#6cb6ff"),
    "second": ("#b34700", "#f0a35e"),
    "third": ("#1a7a37", "#57c26a"),
    "fourth": ("#8250df", "#c297ff"),
}
"""Each colour on a light and on a dark screen."""

_LIGHT = {name: light for name, (light, _) in _COLOURS.items()}
_SERIES = (("first", "o", "-"), ("second", "s", "--"), ("third", "^", "-."), ("fourth", "D", "-"))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "multilora",
    "font.size": 11,
    "axes.edgecolor": _LIGHT["grid"],
    "axes.labelcolor": _LIGHT["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": _LIGHT["paper"],
    "axes.facecolor": "none",
    "grid.color": _LIGHT["grid"],
    "text.color": _LIGHT["ink"],
    "xtick.color": _LIGHT["ink"],
    "ytick.color": _LIGHT["ink"],
    "legend.frameon": False,
}

Cells = Sequence[dict[str, str]]
"""The rows of a table: the text of each cell by its column's heading."""


@dataclass(frozen=True)
class Plot:
    """A picture in IMAGES. page, table: the marked table that it shows. draw(axes, rows): draws it."""

    name: str
    page: str
    table: str
    title: str
    draw: Callable[[Axes, Cells], None]

    @property
    def path(self) -> Path:
        return IMAGES / f"{self.name}.svg"


def number(cell: str) -> float:
    """The number that a cell begins with, without its unit. Raises ValueError when there is none."""
    match = re.match(r"[\d,]*\.?\d+", cell)
    if match is None:
        raise ValueError(f"no number: {cell!r}")
    return float(match[0].replace(",", ""))


def draw_lines(axes: Axes, xs: Sequence[float], series: dict[str, Sequence[float]]) -> None:
    for (name, ys), (colour, marker, line) in zip(series.items(), _SERIES, strict=False):
        axes.plot(xs, ys, color=_LIGHT[colour], marker=marker, linestyle=line, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xticks(xs, [f"{x:g}" for x in xs])


def draw_throughput(axes: Axes, rows: Cells) -> None:
    count, *mixes = list(rows[0])[:4]
    xs = [number(row[count]) for row in rows]
    draw_lines(axes, xs, {mix: [number(row[mix]) for row in rows] for mix in mixes})
    axes.set(xlabel="requests at once", ylabel="tokens a second")


def draw_latency(axes: Axes, rows: Cells) -> None:
    rate, *times = rows[0]
    xs = range(len(rows))
    width = 0.8 / len(times)
    for place, (time, shade) in enumerate(zip(times, ("first", "first", "second", "second"), strict=True)):
        is_tail = "p99" in time
        measured = [(x, seconds(row[time]) * 1e3) for x, row in zip(xs, rows, strict=True) if row[time] != "–"]
        bars = axes.bar(
            [x + (place - (len(times) - 1) / 2) * width for x, _ in measured],
            [milliseconds for _, milliseconds in measured],
            width * 0.9,
            color=_LIGHT[shade] if is_tail else "none",
            edgecolor=_LIGHT[shade],
            label=time,
        )
        axes.bar_label(bars, [f"{milliseconds:,.0f}" for _, milliseconds in measured], padding=2, fontsize=9)
    axes.set_yscale("log")
    axes.set_ylim(10, 100_000)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xticks(xs, [row[rate] for row in rows])
    axes.set(xlabel="requests a second", ylabel="milliseconds")


def seconds(cell: str) -> float:
    """0.267 of `267 ms`, 14.7 of `14.7 s`."""
    return number(cell) * (1e-3 if cell.endswith(" ms") else 1)


def draw_steps(axes: Axes, rows: Cells) -> None:
    sequences, *columns = rows[0]
    xs = [number(row[sequences]) for row in rows]
    for (what, limit), (colour, marker, _) in zip(zip(columns[::2], columns[1::2], strict=True), _SERIES, strict=False):
        times = [number(row[what]) for row in rows]
        limits = [time / number(row[limit]) for time, row in zip(times, rows, strict=True)]
        axes.plot(xs, times, color=_LIGHT[colour], marker=marker, label=what)
        axes.plot(xs, limits, color=_LIGHT[colour], linestyle=":")
    axes.plot([], [], color=_LIGHT["ink"], linestyle=":", label="limit of the machine, for each")
    axes.set_ylim(bottom=0)
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.set(xlabel="sequences in the step", ylabel="milliseconds")


def draw_populations(axes: Axes, rows: Cells) -> None:
    populations = [column for column in rows[0] if column.endswith(" adapters")]
    xs = [number(population) for population in populations]
    rates: dict[str, Sequence[float]] = {
        row[""]: [number(row[population]) for population in populations] for row in rows if "throughput" in row[""]
    }
    axes.set_xscale("log")
    draw_lines(axes, xs, rates)
    axes.minorticks_off()
    axes.set_ylim(top=1.4 * max(rate for line in rates.values() for rate in line))
    axes.set(xlabel="adapters that are asked", ylabel="tokens a second")


PLOTS = (
    Plot(
        "throughput",
        "performance.md",
        "throughput",
        "Tokens a second, by requests and adapters at once",
        draw_throughput,
    ),
    Plot("latency", "performance.md", "load", "Times under requests that arrive at random", draw_latency),
    Plot(
        "steps",
        "performance.md",
        "steps",
        "A decode step, and what bytes and operations need at least",
        draw_steps,
    ),
    Plot(
        "many-adapters",
        "performance.md",
        "adapters throughput",
        "Tokens a second, by the adapters that are asked",
        draw_populations,
    ),
)


def draw(plot: Plot) -> str:
    """The plot as SVG, the same for the same table."""
    rows = read_cells(DOCS / plot.page, plot.table)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 3.8))
        axes = figure.subplots()
        figure.subplots_adjust(left=0.14, right=0.97, top=0.89, bottom=0.14)
        plot.draw(axes, rows)
        figure.text(0.02, 0.94, plot.title, fontsize=12, fontweight="bold")
        axes.set_axisbelow(True)
        axes.grid(axis="y")
        axes.tick_params(length=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", fontsize=10)
        file = io.StringIO()
        metadata: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=metadata | {"Title": plot.title})
    return in_two_themes(file.getvalue())


def in_two_themes(svg: str) -> str:
    """The picture with colours that a screen's theme chooses, and the screen's own font."""
    for name, colour in _LIGHT.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    light, dark = ("".join(f"--{name}:{pair[theme]};" for name, pair in _COLOURS.items()) for theme in (0, 1))
    style = f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    svg = re.sub(r"<svg [^>]*>", lambda match: f"{match[0]}\n {style}", svg, count=1)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def write_plots(page: Path) -> list[Path]:
    """Draw the plots of a page anew, as its tables are now; their files."""
    plots = [plot for plot in PLOTS if DOCS / plot.page == page]
    for plot in plots:
        plot.path.write_text(draw(plot))
    return [plot.path for plot in plots]


def main() -> None:
    """Draw all plots of docs/images from the tables that stand in docs/."""
    for page in dict.fromkeys(DOCS / plot.page for plot in PLOTS):
        for path in write_plots(page):
            print(path.relative_to(REPOSITORY))
