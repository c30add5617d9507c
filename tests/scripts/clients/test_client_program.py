from __future__ import annotations

from dataclasses import replace

import pytest

from clients.client_program import ClientProgram, Outcome, markdown
from conformance import PROGRAMS

ROW = ClientProgram("ask.py", "v1", "streamed", "asker-v1", ("{python}", "{folder}/ask.py", "{http}", "a b"), "Par.s")


def test_a_command_has_the_places_of_a_run_and_keeps_its_arguments_whole() -> None:
    places = {"python": "/bin/py", "folder": "/c/asker v1", "http": "localhost:1", "grpc": "unused"}
    assert ROW.command(places) == ["/bin/py", "/c/asker v1/ask.py", "localhost:1", "a b"]
    with pytest.raises(KeyError, match="openai"):
        replace(ROW, argv=("{openai}",)).command(places)


@pytest.mark.parametrize(
    ("expected", "status", "output", "passed"),
    [
        (Outcome.WORKS, 0, "It is Paris.", True),
        (Outcome.WORKS, 1, "It is Paris.", False),
        (Outcome.WORKS, 0, "Received an error from server", False),
        (Outcome.REFUSED, 1, "It is Paris.", True),
        (Outcome.REFUSED, 0, "It is Paris.", True),
        (Outcome.REFUSED, 1, "Traceback", False),
    ],
)
def test_a_run_passes_by_what_it_shows_and_one_that_shall_work_by_its_status_too(
    expected: Outcome, status: int, output: str, passed: bool
) -> None:
    assert replace(ROW, expected=expected).passes(status, output) == passed


def test_the_table_has_a_line_for_what_ends_alike() -> None:
    whole = replace(ROW, mode="whole")
    noted = replace(ROW, mode="images", expected=Outcome.NOT_RUN, note="it needs a GPU")
    rows = [ROW, whole, replace(ROW, version="v2"), replace(whole, version="v2"), noted, replace(whole, version="v3")]
    assert markdown(rows).splitlines()[2:] == [
        "| `ask.py` | v1, v2 | streamed | works |",
        "| `ask.py` | v1, v2, v3 | whole | works |",
        "| `ask.py` | v1 | images | not run: it needs a GPU |",
    ]
    assert markdown(rows[:4]).splitlines()[2:] == ["| `ask.py` | v1, v2 | streamed; whole | works |"]


def test_every_row_of_the_tables_is_another() -> None:
    rows = {(row.program, row.version, row.mode) for row in PROGRAMS}
    assert len(rows) == len(PROGRAMS) > 50


def test_every_row_that_is_run_shows_something_and_every_one_that_is_not_says_why() -> None:
    for row in PROGRAMS:
        assert row.note if row.expected is Outcome.NOT_RUN else row.shows and row.argv
