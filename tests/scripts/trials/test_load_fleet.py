"""The tables of a fleet's trial tell every outcome, and have their places on the page; its run is in tests/e2e."""

from __future__ import annotations

import pytest

from marked_tables import markdown_table, read_table
from trials.fleet_judge import Asked, Tally
from trials.load_fleet import PAGE, PHASE_COLUMNS, phase_rows, told


def test_a_phase_is_told_by_its_outcomes_and_times() -> None:
    outcomes = ["right"] * 17 + ["absent"] * 2 + ["unavailable"]
    asked = [
        Asked(second=0.0, number=0, door="Triton", worker=1, outcome=outcome, seconds=0.05) for outcome in outcomes
    ]
    table = markdown_table(PHASE_COLUMNS, phase_rows([Tally("all workers", asked)]))
    assert table.splitlines()[2:] == ["| all workers | 17 | 0 | 0 | 0 | 2 | 1 | 0 | 50 | 50 | 0% |"]


def test_the_operations_of_the_operator_are_told_by_their_names() -> None:
    assert told({"move": 53, "load": 4}) == "Meanwhile: 4 x load, 53 x move."


@pytest.mark.parametrize("name", ["fleet phases", "fleet routing", "fleet ways"])
def test_each_table_of_a_command_has_its_place_on_the_page(name: str) -> None:
    assert "\nBy `scripts/run " in read_table(PAGE, name)
