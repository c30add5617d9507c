"""What clients of TensorRT-LLM's Triton backend rely on, row by row: run the tests that stand for the rows, and print
how they went. The rows are read from the tests' source; README.md shows the same table.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
TESTS = sorted((REPOSITORY / "tests" / "e2e").glob("test_conformance_*.py"))

_BLOCK = re.compile(r"(?<=<!-- conformance: begin -->\n).*?(?=<!-- conformance: end -->)", re.DOTALL)

console = Console(highlight=False, emoji=False)


@dataclass(frozen=True)
class Row:
    """One requirement. answer: what this server does, `works` or `refused`. test: file and function that show it."""

    interface: str
    requirement: str
    answer: str
    test: tuple[str, str]


def read_rows(paths: Sequence[Path] = TESTS) -> list[Row]:
    """The rows of all tests that are marked with `@row(...)`, in the order of the files."""
    return [row for path in paths for row in _rows_of(path)]


def _rows_of(path: Path) -> Iterator[Row]:
    for node in ast.parse(path.read_text()).body:
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "row":
                interface, requirement, *answer = (ast.literal_eval(argument) for argument in decorator.args)
                yield Row(interface, requirement, *(answer or ["works"]), test=(path.name, node.name))


@dataclass
class Outcomes:
    """A pytest plugin: for each test of a row, whether it passed with all of its parameters."""

    passed: dict[tuple[str, str], bool] = field(default_factory=lambda: defaultdict(lambda: True))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = Path(report.location[0]).name, report.location[2].partition("[")[0]
        self.passed[test] &= report.passed

    def of(self, row: Row) -> bool:
        return row.test in self.passed and self.passed[row.test]


def markdown(rows: Sequence[Row]) -> str:
    """The table of README.md."""
    lines = ["| interface | what its clients rely on | here |", "| --- | --- | --- |"]
    lines += [f"| {row.interface} | {row.requirement} | {row.answer} |" for row in rows]
    return "\n".join(lines) + "\n"


def readme_table() -> str:
    """What README.md shows now."""
    block = _BLOCK.search(README.read_text())
    assert block is not None, "README.md has lost its marks <!-- conformance: begin --> and end"
    return block[0]


def main(
    update_readme: Annotated[
        bool, typer.Option("--readme", help="Write the table into README.md when every row has passed.")
    ] = False,
) -> None:
    """Start a server with the default model, run the conformance tests against it, and print a line for each row.

    `works`: the server does what the clients rely on; `refused`: it does not, and says so by UNSUPPORTED and the name
    of the tensor. Either is tested. The exit status is 1 when a row has failed.
    """
    rows, outcomes = read_rows(), Outcomes()
    pytest.main([f"--rootdir={REPOSITORY}", "-q", *map(str, TESTS)], plugins=[outcomes])
    _show(rows, outcomes)
    if not all(outcomes.of(row) for row in rows):
        raise typer.Exit(1)
    if update_readme:
        README.write_text(_BLOCK.sub(lambda _: markdown(rows), README.read_text()))


def _show(rows: Sequence[Row], outcomes: Outcomes) -> None:
    table = Table("interface", "what its clients rely on", "here", "test")
    for row in rows:
        table.add_row(
            row.interface,
            escape(row.requirement),
            row.answer,
            "[green]pass[/]" if outcomes.of(row) else "[bold red]FAIL[/]",
        )
    console.print(table)
    console.print(f"{sum(map(outcomes.of, rows))} of {len(rows)} rows passed")


if __name__ == "__main__":
    typer.run(main)
