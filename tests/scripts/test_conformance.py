from __future__ import annotations

from pathlib import Path

import pytest

from conformance import PAGE, Outcomes, Row, markdown, read_rows
from marked_tables import read_table

SOURCE = """
@row("ensemble", "it answers")
@pytest.mark.parametrize("streaming", [True, False])
def test_a(streaming): ...


@row("ensemble", "it sings", "refused")
def test_b(): ...


def test_c(): ...
"""


def test_the_docs_show_the_rows_that_the_tests_have() -> None:
    assert read_table(PAGE, "conformance") == markdown(read_rows())


def test_every_row_is_another() -> None:
    rows = read_rows()
    assert len({(row.interface, row.requirement) for row in rows}) == len(rows) > 50
    assert {row.answer for row in rows} <= {"works", "refused"}


def test_rows_are_read_from_the_source(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(SOURCE)
    assert read_rows([path]) == [
        Row("ensemble", "it answers", "works", ("test_x.py", "test_a")),
        Row("ensemble", "it sings", "refused", ("test_x.py", "test_b")),
    ]


@pytest.mark.parametrize(("outcomes", "expected"), [("pp", True), ("pf", False), ("fp", False), ("", False)])
def test_a_row_passes_with_all_parameters_of_its_test(outcomes: str, expected: bool) -> None:
    recorded = Outcomes()
    for number, outcome in enumerate(outcomes):
        location = ("tests/e2e/test_x.py", 3, f"test_a[{number}]")
        report = pytest.TestReport("x", location, {}, "passed" if outcome == "p" else "failed", None, "call")
        recorded.pytest_runtest_logreport(report)
    assert recorded.of(Row("ensemble", "it answers", "works", ("test_x.py", "test_a"))) == expected
