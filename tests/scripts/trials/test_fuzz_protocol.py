"""The rules by which fuzzing calls an answer right, and memory flat."""

from __future__ import annotations

import pytest

from trials.fuzz_doors import ANSWERED, Outcome
from trials.fuzz_protocol import Sizes, Tally, is_right, render, second_half_growth
from trials.fuzz_requests import Case
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
