"""The counts of the check of streamed text stand in the document as the check gives them."""

from __future__ import annotations

from marked_tables import read_table
from trials.check_streamed_text import PAGE, SAMPLES, TABLE, outcome_table, questions


def test_the_page_has_the_counts() -> None:
    asked = questions(3 * len(SAMPLES), seed=1)
    table = outcome_table(asked, ["one", "two"]).splitlines()
    assert table[2:] == [
        "| prompts | 63 |",
        "| scripts, and emoji | 21 |",
        "| answers that are a demanded text | 42 |",
        "| streams, at two doors | 126 |",
        "| faults | 2 |",
    ]
    assert table[:2] == read_table(PAGE, TABLE).splitlines()[:2]
