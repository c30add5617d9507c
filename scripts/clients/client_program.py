"""`ClientProgram`: a program as its authors ship it, in one use of it, which has to work with this server.

The tables are triton_client_programs.py and openai_client_programs.py; `scripts/conformance --clients DIR` runs them. A
row is run by the command `argv` (`env NAME=VALUE ...` for variables), in which these names stand for values of a run:

    {python}   our own interpreter, which has tritonclient and transformers
    {folder}   DIR/<folder>: a checkout, or a virtual environment of the user's, whose commands are {folder}/bin/NAME
    {grpc} {http} {openai}   host:port of the server's protocols, and of `multilora openai` in front of it
    {model}    directory of the served checkpoint, with its tokenizer
    {adapters} directory of the sample adapters, PEFT's files
    {clients}  the directory of this file
    {scripts}  the one above it, which has the command perf_analyzer
    {scratch}  directory that all rows of a run share, empty at first but for the files of client_inputs.py;
               a row may read files of the rows before it; the command runs in it

A row passes when the command ends with `status` (`WORKS`), or with any (`REFUSED`, `FAILS`), and its output matches
`shows`. `FAILS` is for programs that cannot work here; the note says why.
`NOT_RUN` is a row that is not run; its note says why.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Served(StrEnum):
    """The server that a row needs: with upstream's models of one kind, or with OpenAI's protocol before it."""

    DECOUPLED = "decoupled"
    UNARY = "unary"
    OPENAI = "openai"


class Outcome(StrEnum):
    WORKS = "works"
    REFUSED = "refused"
    FAILS = "fails"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class ClientProgram:
    """program, version, mode: the program, and the use of it that is tried, in the words of docs/clients.md.

    folder: its folder in DIR. argv: the command. shows: a regular expression that its output has to match, which says
    that it did its task: many programs end with status 0 in any case. status: its exit status when it works.
    note: a remark that a user needs, for the table.
    """

    program: str
    version: str
    mode: str
    folder: str
    argv: tuple[str, ...]
    shows: str
    served: Served = Served.DECOUPLED
    expected: Outcome = Outcome.WORKS
    note: str = ""
    status: int = 0

    @property
    def outcome(self) -> str:
        """The expected answer, in words."""
        return f"{self.expected}: {self.note}" if self.note else str(self.expected)

    def command(self, places: Mapping[str, str]) -> list[str]:
        """`argv` for a run. Raises KeyError for a name in braces that `places` has not."""
        return [re.sub(r"\{(\w+)\}", lambda found: places[found[1]], argument) for argument in self.argv]

    def passes(self, status: int, output: str) -> bool:
        """Whether a run with this end went as expected."""
        assert self.expected is not Outcome.NOT_RUN
        return (status == self.status or self.expected is not Outcome.WORKS) and re.search(
            self.shows, output
        ) is not None


def markdown(programs: Sequence[ClientProgram]) -> str:
    """The table of docs/clients.md: a mode of several versions is one line, so are modes of one outcome."""
    versions = _grouped((row.program, row.mode, row.outcome, row.version) for row in programs)
    modes = _grouped((program, outcome, ", ".join(known), mode) for (program, mode, outcome), known in versions.items())
    lines = ["| program | version | modes | here |", "| --- | --- | --- | --- |"]
    for (program, outcome, known), tried in modes.items():
        lines.append(f"| `{program}` | {known} | {'; '.join(tried)} | {outcome} |")
    return "\n".join(lines) + "\n"


def _grouped(rows: Iterable[tuple[str, str, str, str]]) -> dict[tuple[str, str, str], list[str]]:
    """The last entries of rows by their first ones, in the order of the rows."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for *key, last in rows:
        groups[key[0], key[1], key[2]].append(last)
    return groups
