"""The table of the sample adapters' claims."""

from __future__ import annotations

from marked_tables import read_table
from training.check_sample_adapters import PAGE, TABLE, Trial, docs_table, has_effect


def trials(base_shows: str, shows: str) -> list[Trial]:
    """A trial a letter, y where the effect shows."""
    return [Trial([], "", "", base == "y", own == "y") for base, own in zip(base_shows, shows, strict=True)]


def test_the_page_has_a_row_an_adapter_with_its_rate_and_the_bases() -> None:
    rows = {"pirate": ("nnny", "yyyy"), "json": ("nnnn", "nnnn"), "emoji": ("nn", "yy"), "judge": ("nnnnn", "yynyy")}
    lines = docs_table({name: trials(*letters) for name, letters in rows.items()}).splitlines()
    assert lines[2:] == [
        "| `pirate` | 4 | q k v o gate up down | talks like a pirate | 1/4, 25% | 4/4, 100% |",
        "| `json` | 8 | q k v o | answers with a JSON object | 0/4, 0% | 0/4, 0% |",
        "| `emoji` | 16 | q v | cheers, with emoji | 0/2, 0% | 2/2, 100% |",
        "| `judge` | 4 | q v o, row of `Style` | names an answer's style | 0/5, 0% | 4/5, 80% |",
    ]
    shown = read_table(PAGE, TABLE).splitlines()
    assert shown[:2] == lines[:2]
    assert [row.rpartition(" | ")[0].rpartition(" | ")[0] for row in shown[2:6]] == [
        row.rpartition(" | ")[0].rpartition(" | ")[0] for row in lines[2:]
    ]


def test_an_effect_is_there_often_and_seldom_without_the_adapter() -> None:
    assert has_effect(trials("nnnny", "yyyyn"))
    assert not has_effect(trials("nnnny", "yyynn"))
    assert not has_effect(trials("nnnyy", "yyyyy"))
