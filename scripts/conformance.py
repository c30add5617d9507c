"""The behaviour that clients of TensorRT-LLM's Triton backend rely on, row by row: run the tests that stand for the
rows, and print how they went. The rows are read from the tests' source; docs/clients.md shows the same table, and a
second one, of programs that their authors ship: `--clients DIR` runs those.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from rich.console import Console

from marked_tables import console_table, markdown_table, write_table
from repository import REPOSITORY

PAGE = REPOSITORY / "docs" / "clients.md"
E2E = REPOSITORY / "tests" / "e2e"
TESTS = sorted(E2E.glob("test_conformance_*.py"))


@dataclass(frozen=True)
class Row:
    """One requirement. answer: of this server, `works` or `refused`. test: file and function that show it."""

    interface: str
    requirement: str
    answer: str
    test: tuple[str, str]


def read_rows(paths: Sequence[Path] = TESTS) -> list[Row]:
    """The rows of all tests that are marked with `@row(...)`, in the order of the files."""
    return [row for path in paths for row in _rows_of(path)]


def _rows_of(path: Path) -> Iterator[Row]:
    functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    for node in functions:
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "row":
                yield _row(decorator, (path.name, node.name))


def _row(decorator: ast.Call, test: tuple[str, str]) -> Row:
    interface, requirement, *answer = (ast.literal_eval(argument) for argument in decorator.args)
    return Row(interface, requirement, answer[0] if answer else "works", test)


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
    """The table of docs/clients.md: a row for each interface and answer, a line for each requirement."""
    requirements = defaultdict(list)
    for row in rows:
        requirements[row.interface, row.answer].append(row.requirement)
    cells = ((interface, "<br>".join(lines), answer) for (interface, answer), lines in requirements.items())
    return markdown_table(("interface", "what its clients rely on", "here"), cells, numbers=())


def main(
    update_docs: Annotated[
        bool, typer.Option("--docs", help="Write the table into docs/clients.md when every row has passed.")
    ] = False,
    clients: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            exists=True,
            show_default=False,
            help="Run the programs that clients' authors ship, as they are, instead of our tests. The directory has a "
            "checkout of each, by the names that tests/support/client_programs.py gives.",
        ),
    ] = None,
    python: Annotated[
        Path, typer.Option(help="With --clients: the interpreter of programs in Python, which has what they import.")
    ] = Path(sys.executable),
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="With --clients: programs whose name, version or mode has this; repeatable."),
    ] = None,
) -> None:
    """Start a server with the default model, run the conformance tests against it, and print a line for each row.

    `works`: the server does what the clients rely on; `refused`: it does not, and says so by UNSUPPORTED and the name
    of the tensor. Either is tested. The exit status is 1 when a row has failed.
    """
    if only and update_docs:
        raise typer.BadParameter("--docs is for a run of every row; leave out --only")
    if clients is not None:
        run_programs(clients, python, only or [""], update_docs)
        return
    rows, outcomes = read_rows(), Outcomes()
    pytest.main([f"--rootdir={REPOSITORY}", "-q", *map(str, TESTS)], plugins=[outcomes])
    verdicts = [(row.interface, row.requirement, row.answer, "pass" if outcomes.of(row) else "FAIL") for row in rows]
    console = Console(highlight=False, emoji=False)
    console.print(console_table(("interface", "what its clients rely on", "here", "test"), verdicts))
    console.print(f"{sum(map(outcomes.of, rows))} of {len(rows)} rows passed")
    if not all(outcomes.of(row) for row in rows):
        raise typer.Exit(1)
    if update_docs:
        write_table(PAGE, "conformance", markdown(rows))


@dataclass(frozen=True)
class Chosen:
    """A pytest plugin that leaves out the programs whose words have none of these texts."""

    texts: Sequence[str]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        programs = [item for item in items if item.get_closest_marker("client_program")]
        items[:] = [item for item in programs if any(text in item.name for text in self.texts)]


def run_programs(clients: Path, python: Path, only: Sequence[str], update_docs: bool) -> None:
    """Run the programs in `clients` whose words have one of `only`. Raises typer.Exit when one went not as expected."""
    options = [f"--rootdir={REPOSITORY}", "-v", f"--clients={clients.absolute()}", f"--clients-python={python}"]
    if pytest.main([*options, str(E2E / "test_client_programs.py")], plugins=[Chosen(only)]):
        raise typer.Exit(1)
    if update_docs:
        sys.path.append(str(REPOSITORY / "tests"))
        programs = importlib.import_module("support.client_programs")
        write_table(PAGE, "client programs", programs.markdown(programs.PROGRAMS))
