"""The tables of docs/performance.md that `bench_serving --docs` writes; the page's plots are drawn from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from marked_tables import figure, write_table
from multilora_client.bench.report import Percentiles, Stage, summarise
from plots import DOCS, write_plots

PAGE = DOCS / "performance.md"
_AT_ONCE = " at once, "


def write_tables(
    rates: Mapping[str, Sequence[float]],
    counts: Sequence[int],
    stages: Sequence[Stage],
    source: str,
) -> None:
    """Write what was measured into the page, and draw its plots anew.

    rates: tokens/s of every round by `measurement`. counts: requests at once. stages: of the load, rising.
    source: the sentence that tells where figures are from.
    """
    if measurement(counts[0], "no adapter") in rates:
        write_table(PAGE, "throughput", throughput_table(rates, counts), source)
    if stages:
        write_table(PAGE, "load", load_table(stages), source)
    write_plots(PAGE)


def measurement(count: int, mix: str) -> str:
    """How the results call `count` requests at once of these adapters."""
    return f"{count}{_AT_ONCE}{mix}"


def throughput_table(rates: Mapping[str, Sequence[float]], counts: Sequence[int]) -> str:
    """Medians of tokens/s: a row for each number of requests at once."""
    mixes = list(dict.fromkeys(what.partition(", ")[2] for what in rates if _AT_ONCE in what))
    lines = [f"| requests at once | {' | '.join(mixes)} | |", f"| ---: |{' ---: |' * len(mixes)} --- |"]
    for count in counts:
        medians = (statistics.median(rates[measurement(count, mix)]) for mix in mixes)
        lines.append(f"| {count} | {' | '.join(figure(value) for value in medians)} | tokens/s |")
    return "\n".join(lines) + "\n"


def load_table(stages: Sequence[Stage]) -> str:
    """Percentiles of the times to the first token and between tokens: a row for each rate of requests."""
    columns = ("first token p50", "first token p99", "between tokens p50", "between tokens p99")
    lines = [f"| requests a second | {' | '.join(columns)} |", f"| ---: |{' ---: |' * len(columns)}"]
    for stage in stages:
        summary = summarise(stage.samples)
        cells = [cell for times in (summary.first_token, summary.gap) for cell in _cells(times)]
        lines.append(f"| {stage.load.level:g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(times: Percentiles) -> list[str]:
    return [_time(times.p50), _time(times.p99)]


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
