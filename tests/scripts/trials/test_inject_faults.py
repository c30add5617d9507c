"""The judge sees every forbidden outcome; the faults themselves are injected in tests/e2e."""

from __future__ import annotations

from collections import Counter

import pytest

from marked_tables import read_cells
from repository import REPOSITORY
from trials.inject_faults import COLUMNS, FAULTS, NO_ERRORS, UNAVAILABLE, Fault, Outcome, markdown
from trials.judging_clients import Tally

FAULT = Fault("a fault", lambda _: None, UNAVAILABLE)


def test_right_answers_and_the_errors_that_a_fault_explains_are_no_complaint() -> None:
    seen = Tally(Counter({"right": 5, "UNAVAILABLE": 3, "uploads": 2}))
    assert Outcome(FAULT, seen, recovery_s=1.0, num_acknowledged=2).complaints == []


@pytest.mark.parametrize(
    ("seen", "recovery_s", "complaint"),
    [
        (Tally(wrong=["adapter 3 answered <1>"]), 1.0, "adapter 3 answered <1>"),
        (Tally(lost={4}), 1.0, "1 of 2 adapters are lost"),
        (Tally(stuck=1), 1.0, "1 requests were stuck"),
        (Tally(Counter({"INTERNAL": 1, "UNAVAILABLE": 1}), {"INTERNAL": "a bug"}), 1.0, "clients saw INTERNAL: a bug"),
        (Tally(), None, "not every client was answered again"),
    ],
)
def test_what_must_not_be_is_a_complaint(seen: Tally, recovery_s: float | None, complaint: str) -> None:
    assert Outcome(FAULT, seen, recovery_s, num_acknowledged=2).complaints == [complaint]


def test_a_fault_that_explains_no_error_starts_no_process_again() -> None:
    harmless = Fault("a harmless fault", lambda _: None, NO_ERRORS)
    replaced = frozenset({"engine"})
    assert Outcome(FAULT, Tally(), 1.0, 2, replaced).complaints == []
    assert Outcome(harmless, Tally(), 1.0, 2, replaced).complaints == ["engine was started again"]


def test_a_row_tells_what_clients_saw_of_a_fault() -> None:
    seen = Tally(Counter({"right": 5, "UNAVAILABLE": 3, "uploads": 2}), lost={4})
    rows = markdown([Outcome(FAULT, seen, recovery_s=1.04, num_acknowledged=2)]).splitlines()
    assert rows[2] == "| a fault | 5 right, 3 UNAVAILABLE | 1.0 | 2 | 1 | 0 |"


def test_the_page_has_a_row_for_each_fault() -> None:
    rows = read_cells(REPOSITORY / "docs" / "operating.md", "faults")
    assert [row["fault"] for row in rows] == [fault.name for fault in FAULTS]
    assert list(rows[0]) == list(COLUMNS)
