"""The tables of docs/performance.md that `bench_peers --docs` writes, with versions and what an engine cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.contestants import Contestant
from benchmarks.peers.figures import Figures
from marked_tables import figure, markdown_table, write_table
from plots import DOCS

PAGE = DOCS / "performance.md"
RATES = "peers"
TIMES = "peers times"
QUANTIZED_RATES = "peers quantized"
QUANTIZED_PROMPTS = "peers quantized prompts"
GOALS = "peers quantized goals"
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


def write_quantized_tables(
    figures: Sequence[Figures], contestants: Sequence[Contestant], versions: Mapping[str, str], source: str
) -> None:
    """As `write_tables`, of engines whose weights are integers: rates and memory, and the goals for them.

    Long prompts, which take as long as all others, may be measured alone: they have a table of their own.
    """
    told = source + "\n\n" + "\n".join(f"- {line}" for line in notes(figures, contestants, versions))
    short = [row for row in figures if row.case.startswith("base, ")]
    long = [row for row in figures if row not in short]
    if short:
        write_table(PAGE, QUANTIZED_RATES, quantized_rates_table(short), told)
        write_table(PAGE, GOALS, goals_table(short), source)
    if long:
        write_table(PAGE, QUANTIZED_PROMPTS, quantized_rates_table(long), source if short else told)


def rates_table(figures: Sequence[Figures]) -> str:
    """A row an engine, a column a case: tokens/s; and how many answers of all cases are the reference's."""
    return _table(figures, "tokens a second", lambda row: figure(row.tokens_per_s), {"the same answers": _equal})


def quantized_rates_table(figures: Sequence[Figures]) -> str:
    """`rates_table` with the size of the files of weights, and the memory of each engine's process after all cases."""
    sizes: dict[str, Callable[[Sequence[Figures]], str]] = {
        "files of weights": lambda rows: f"{figure(rows[0].weights_mb)} MB",
        "resident memory": lambda rows: f"{figure(rows[0].resident_mb)} MB",
        "the same answers": _equal,
    }
    return _table(figures, "tokens a second", lambda row: figure(row.tokens_per_s), sizes)


@dataclass(frozen=True)
class Goal:
    """To be `at_least` times as fast as others in a case.

    ours, theirs: how names of contestants begin; the fastest of each counts.
    """

    ours: str
    theirs: str
    case: str
    at_least: float


QUANTIZED_GOALS = (
    *(Goal("multilora, w8a16", "OpenVINO GenAI, int8", f"base, {n} at once", 1) for n in (1, 8, 16)),
    Goal("multilora, w4a16", "llama.cpp, Q4", "base, 1 at once", 1.8),
)


def goals_table(figures: Sequence[Figures]) -> str:
    """A row for each goal whose case both sides have served."""
    rows = []
    for goal in QUANTIZED_GOALS:
        ours, theirs = (_fastest(figures, goal.case, name) for name in (goal.ours, goal.theirs))
        if ours is not None and theirs is not None:
            ratio = ours.tokens_per_s / theirs.tokens_per_s
            verdict = "" if ratio >= goal.at_least else ", missed"
            rates = [f"{row.peer}: {figure(row.tokens_per_s)}" for row in (ours, theirs)]
            rows.append([goal.case, *rates, f"{figure(ratio)} x{verdict}", f">= {goal.at_least:g}"])
    return markdown_table(("tokens a second", "ours", "theirs", "times as fast", "goal"), rows)


def _fastest(figures: Sequence[Figures], case: str, name: str) -> Figures | None:
    rows = [row for row in figures if row.case == case and row.peer.startswith(name)]
    return max(rows, key=lambda row: row.tokens_per_s, default=None)


def _equal(rows: Sequence[Figures]) -> str:
    return f"{sum(row.num_equal for row in rows)} of {sum(row.num_answers for row in rows)}"


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
