"""The rates, gaps and tokens of a peer in a case, as a table, as CSV and as a plot."""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Column, Table

from benchmarks.peers.contestants import RunningPeer
from benchmarks.peers.exchange import Answer


@dataclass(frozen=True)
class Figures:
    """Medians over rounds.

    tokens_per_s: of all answers together. first_token_ms: of each answer. gap_p99_ms: between neighbouring tokens of an
    answer. num_equal: answers that are the reference's, token for token, of num_answers. weights_mb: the files of
    weights that the peer read. resident_mb: the peer's memory after all cases. MB are 10^6 bytes.
    """

    peer: str
    case: str
    tokens_per_s: float
    first_token_ms: float
    gap_p99_ms: float
    num_equal: int
    num_answers: int
    weights_mb: float
    resident_mb: float

    @classmethod
    def of(cls, peer: RunningPeer, case: str, answers: Sequence[Answer], expected: Sequence[list[int]]) -> Figures:
        """answers: of each round."""
        return cls(
            peer.name,
            case,
            statistics.median(sum(map(len, each.tokens)) / max(map(max, each.times)) for each in answers),
            1e3 * statistics.median(times[0] for each in answers for times in each.times),
            1e3 * statistics.median(_gap_p99(each) for each in answers),
            sum(ours == theirs for ours, theirs in zip(answers[-1].tokens, expected, strict=True)),
            len(expected),
            peer.weight_bytes / 1e6,
            peer.resident_bytes / 1e6,
        )


def _gap_p99(answer: Answer) -> float:
    gaps = sorted(after - before for times in answer.times for before, after in itertools.pairwise(times))
    return gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]


def print_figures(figures: Sequence[Figures], title: str, console: Console) -> None:
    """A row a peer and case, by case."""
    columns = ("tok/s", "first token ms", "gap p99 ms", "equal answers", "resident MB")
    table = Table(Column("case", no_wrap=True), "engine", *columns, title=title)
    for case, rows in itertools.groupby(sorted(figures, key=lambda f: f.case), key=lambda f: f.case):
        for place, row in enumerate(rows):
            table.add_row(
                "" if place else case,
                row.peer,
                f"{row.tokens_per_s:.0f}",
                f"{row.first_token_ms:.0f}",
                f"{row.gap_p99_ms:.0f}",
                f"{row.num_equal} of {row.num_answers}",
                f"{row.resident_mb:.0f}",
            )
        table.add_section()
    console.print(table)


def with_earlier(figures: Sequence[Figures], output: Path) -> list[Figures]:
    """The figures, and those of `peers.csv` in a folder for other peers and cases.

    A file with other columns, which another version wrote, is left out.
    """
    measured = {(row.peer, row.case) for row in figures}
    earlier: list[Figures] = []
    if (output / "peers.csv").exists():
        with (output / "peers.csv").open(newline="") as file:
            rows = csv.DictReader(file)
            if rows.fieldnames == [each.name for each in fields(Figures)]:
                earlier = [msgspec.convert(row, Figures, strict=False) for row in rows]
    return [*(row for row in earlier if (row.peer, row.case) not in measured), *figures]


def write_figures(figures: Sequence[Figures], title: str, output: Path) -> None:
    """`peers.csv` and `peers.svg` in a folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    output.mkdir(parents=True, exist_ok=True)
    with (output / "peers.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Figures)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in figures)
    cases = list(dict.fromkeys(row.case for row in figures))
    heights = [sum(row.case == case for row in figures) for case in cases]
    size = (9, 1 + 0.8 * len(cases) + 0.22 * len(figures))
    figure, axes = pyplot.subplots(len(cases), figsize=size, squeeze=False, height_ratios=heights, layout="constrained")
    for axis, case in zip(axes[:, 0], cases, strict=True):
        rows = [row for row in figures if row.case == case][::-1]
        bars = axis.barh([row.peer for row in rows], [row.tokens_per_s for row in rows])
        axis.bar_label(bars, fmt="%.0f")
        axis.set_title(f"{case}, tokens per second", loc="left", fontsize="medium")
    figure.suptitle(title)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "peers"}):
        figure.savefig(output / "peers.svg", metadata={"Date": None})
    pyplot.close(figure)
