"""The files and tables of a benchmark."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path

from rich.console import Console

from benchmarks.results import Row, at_least, at_most, measures_table, report, threads_title


def test_a_run_leaves_its_rows_as_csv(tmp_path: Path) -> None:
    rows = [Row("a", 1.5, "ms"), at_most("b", 2.0, "x", 3), at_least("c", 1.0, "ms", 2), at_least("d", 1.0, "x", None)]
    report(rows, "title", tmp_path, "adapters", Console(file=StringIO()))
    with (tmp_path / "adapters.csv").open() as file:
        assert [(row["what"], row["value"], row["is_met"]) for row in csv.DictReader(file)] == [
            ("a", "1.5", ""),
            ("b", "2.0", "True"),
            ("c", "1.0", "False"),
            ("d", "1.0", ""),
        ]


def test_a_title_says_how_threads_wait() -> None:
    assert threads_title({}).endswith(" threads")
    assert threads_title({"HOME": "/", "GOMP_SPINCOUNT": "7"}).endswith(" threads, GOMP_SPINCOUNT=7")


def test_a_page_has_a_row_a_subject_and_says_what_misses_its_goal() -> None:
    rows = [
        Row("throughput, mixed: 5 adapters", 2513.4, "tokens/s"),
        at_least("throughput, mixed: 2000 against 5", 0.911, "x", 0.95),
        Row("throughput, alike: 5 adapters", 99.94, "tokens/s"),
    ]
    assert measures_table(rows).splitlines() == [
        "| | 5 adapters | 2000 against 5 (goal >= 0.95) |",
        "| --- | ---: | ---: |",
        "| throughput, mixed | 2,513 tokens/s | 0.911 x, missed |",
        "| throughput, alike | 99.9 tokens/s | |",
    ]
