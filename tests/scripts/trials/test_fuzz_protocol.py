"""The rules by which fuzzing calls an answer right, and memory flat."""

from __future__ import annotations

import pytest

from marked_tables import read_table
from trials.fuzz_doors import ANSWERED, Outcome
from trials.fuzz_protocol import PAGE, TABLE, Sizes, Tally, is_right, outcome_table, render, second_half_growth
from trials.fuzz_requests import NOTHING, Case
from trials.wire_requests import WireRequest

REQUEST = WireRequest("gRPC", "generation_unary", "r", [])
ENGINE = (1, "engine")


@pytest.mark.parametrize(
    ("kind", "word", "expected"),
    [
        ("nothing", ANSWERED, True),
        ("nothing", "UNAVAILABLE", True),
        ("nothing", "INVALID_ARG", False),
        ("missing", "INVALID_ARG", True),
        ("missing", ANSWERED, True),
        ("missing", "INTERNAL", False),
        ("missing", "no answer in time", False),
    ],
)
def test_a_valid_request_is_answered_and_any_other_at_least_told_why_not(kind: str, word: str, expected: bool) -> None:
    case, tally = Case(7, kind, REQUEST), Tally()
    assert is_right(case, Outcome(word)) == expected
    tally.add(case, Outcome(word, "why"), 0.5)
    assert [number for number, _ in tally.failures] == ([] if expected else [7])
    assert render(tally).row_count == 2


def test_memory_is_judged_by_what_grows_after_half_of_the_requests() -> None:
    stages = [Sizes({ENGINE: size}, shared=shared) for size, shared in [(0, 0), (50, 90), (60, 90), (70, 90), (65, 90)]]
    assert second_half_growth(stages) == 5
    assert second_half_growth([*stages[:-1], Sizes({ENGINE: 65, (2, "engine"): 40}, shared=90)]) == 40
    assert second_half_growth([*stages[:-1], Sizes({ENGINE: 65}, shared=99)]) == 9


def test_the_page_has_the_outcomes_and_what_became_of_the_server() -> None:
    tally = Tally()
    for number, (kind, word) in enumerate(
        [(NOTHING, ANSWERED), ("missing", "INVALID_ARG"), ("missing", ANSWERED), ("twice", "no answer in time")]
    ):
        tally.add(Case(number, kind, REQUEST), Outcome(word), seconds=number / 2)
    sizes = [Sizes({ENGINE: size << 20, (2, "front"): 0}, shared=0) for size in (1, 2, 5)]
    died = Sizes({ENGINE: 12 << 20, (3, "front"): 1 << 20}, shared=0)
    table = outcome_table(tally, [*sizes, died], is_unchanged=False).splitlines()
    assert table[2:] == [
        "| requests | 4 |",
        "| ways of being wrong | 2 |",
        "| doors | 8 |",
        "| answered | 2 |",
        "| no answer in time | 1 |",
        "| INVALID_ARG | 1 |",
        "| neither an answer nor a typed error, or too late | 1 |",
        "| processes that died | 1 |",
        "| valid requests with another answer afterwards | some |",
        "| most growth over the second half | 7.0 MiB |",
        "| slowest request | 1.5 s |",
    ]
    assert table[:2] == read_table(PAGE, TABLE).splitlines()[:2]
