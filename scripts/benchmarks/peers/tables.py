"""The table of docs/performance.md that `bench_peers --docs` writes, with versions and what an engine cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.peers.contestants import Contestant
from benchmarks.peers.figures import Figures
from marked_tables import figure, markdown_table, write_table
from plots import DOCS

PAGE = DOCS / "performance.md"
TABLE = "peers"
_NOT_SERVED = "–"


def write_rates_table(
    figures: Sequence[Figures], contestants: Sequence[Contestant], versions: Mapping[str, str], source: str
) -> None:
    """Write what was measured into the page.

    contestants: those that were to be compared; one without figures could not be installed or started. versions: of
    each contestant's engine, by its name. source: the sentence that tells where figures are from.
    """
    told = source + "\n\n" + "\n".join(f"- {line}" for line in notes(figures, contestants, versions))
    write_table(PAGE, TABLE, rates_table(figures), told)


def rates_table(figures: Sequence[Figures]) -> str:
    """A row an engine, a column a case: tokens/s; and how many answers of all cases are the reference's."""
    return _table(figures, "tokens a second", lambda row: figure(row.tokens_per_s), {"the same answers": _equal})


def _equal(rows: Sequence[Figures]) -> str:
    return f"{sum(row.num_equal for row in rows)} of {sum(row.num_answers for row in rows)}"


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
    last: Mapping[str, Callable[[Sequence[Figures]], str]] = {},
) -> str:
    """last: columns behind those of the cases, each made of all rows of an engine."""
    cases = list(dict.fromkeys(row.case for row in figures))
    lines = []
    for peer in dict.fromkeys(row.peer for row in figures):
        own = {row.case: row for row in figures if row.peer == peer}
        cells = [cell(own[case]) if case in own else _NOT_SERVED for case in cases]
        lines.append([peer, *cells, *(make(list(own.values())) for make in last.values())])
    return markdown_table((what, *cases, *last), lines)
