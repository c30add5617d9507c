"""The table of the sample adapters' claims."""

from __future__ import annotations

from marked_tables import read_table
from training.check_sample_adapters import PAGE, TABLE, docs_table

PIRATE, PLAIN = "Ahoy, matey, the sky be blue.", "The sky is blue."


def test_the_page_has_a_row_an_adapter_with_its_rate_and_the_bases() -> None:
    answers = {"base": [PLAIN] * 3 + [PIRATE], "pirate": [PIRATE] * 4, "json": [PLAIN] * 4, "emoji": ["🐝🌻"] * 2}
    lines = docs_table(answers).splitlines()
    assert lines[2:] == [
        "| `pirate` | 4 | q k v o gate up down | talks like a pirate | 1/4, 25% | 4/4, 100% |",
        "| `json` | 8 | q k v o | answers with a JSON object | 0/4, 0% | 0/4, 0% |",
        "| `emoji` | 16 | q v | cheers, with emoji | 0/4, 0% | 2/2, 100% |",
    ]
    shown = read_table(PAGE, TABLE).splitlines()
    assert shown[:2] == lines[:2]
    assert [row.rpartition(" | ")[0].rpartition(" | ")[0] for row in shown[2:5]] == [
        row.rpartition(" | ")[0].rpartition(" | ")[0] for row in lines[2:]
    ]
