"""The tables of docs/performance.md that `bench_peers --docs` writes, with versions and what an engine cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.peers.contestants import Contestant
from benchmarks.peers.figures import Figures
from marked_tables import figure, markdown_table, write_table
from plots import DOCS

PAGE = DOCS / "performance.md"
RATES = "peers"
TIMES = "peers times"
_NOT_SERVED = "–"


def write_tables(
    figures: Sequence[Figures], contestants: Sequence[Contestant], versions: Mapping[str, str], source: str
) -> None:
    """Write what was measured into the page.

    contestants: those that were to be compared; one without figures could not be installed or started. versions: of
    each contestant's engine, by its name. source: the sentence that tells where figures are from.
    """
    told = source + "\n\n" + "\n".join(f"- {line}" for line in notes(figures, contestants, versions))
    write_table(PAGE, RATES, rates_table(figures), told)
    write_table(PAGE, TIMES, times_table(figures), source)


def rates_table(figures: Sequence[Figures]) -> str:
    """A row an engine, a column a case: tokens/s; and how many answers of all cases are the reference's."""

    def equal(rows: Sequence[Figures]) -> str:
        return f"{sum(row.num_equal for row in rows)} of {sum(row.num_answers for row in rows)}"

    return _table(figures, "tokens a second", lambda row: figure(row.tokens_per_s), ("the same answers", equal))


def times_table(figures: Sequence[Figures]) -> str:
    """A row an engine, a column a case: the median time to the first token and the p99 between tokens."""
    return _table(
        figures,
        "first token p50, between tokens p99",
        lambda row: f"{figure(row.first_token_ms)}, {figure(row.gap_p99_ms)} ms",
    )


def notes(figures: Sequence[Figures], contestants: Sequence[Contestant], versions: Mapping[str, str]) -> list[str]:
    """A line for each engine: its version, and what it could not do; set-ups of one engine share theirs."""
    measured = {row.peer for row in figures}
    lines: dict[str, None] = {}
    for contestant in contestants:
        if contestant.name not in measured:
            lines[f"{contestant.name}: left out, it could not be installed or started here."] = None
        elif contestant.engines:
            about = f"; no adapters: {contestant.no_adapters}" if contestant.no_adapters else ""
            lines[f"{contestant.engine}: {versions[contestant.name]}{about}."] = None
    return list(lines)


def _table(
    figures: Sequence[Figures],
    what: str,
    cell: Callable[[Figures], str],
    last: tuple[str, Callable[[Sequence[Figures]], str]] | None = None,
) -> str:
    cases = list(dict.fromkeys(row.case for row in figures))
    lines = []
    for peer in dict.fromkeys(row.peer for row in figures):
        own = {row.case: row for row in figures if row.peer == peer}
        cells = [cell(own[case]) if case in own else _NOT_SERVED for case in cases]
        lines.append([peer, *cells, *([last[1](list(own.values()))] if last else [])])
    return markdown_table((what, *cases, *([last[0]] if last else [])), lines)
