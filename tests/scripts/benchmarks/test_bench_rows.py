"""The files of a benchmark."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.bench_rows import Row, threads_title, write_results


def test_a_run_leaves_a_table_and_a_plot(tmp_path: Path) -> None:
    write_results([Row("a", 1.5, "ms"), Row("b", 2.0, "x", "<= 3", True), Row("c", 1.0, "ms")], tmp_path, "adapters")
    with (tmp_path / "adapters.csv").open() as file:
        assert [(row["what"], row["value"], row["is_met"]) for row in csv.DictReader(file)] == [
            ("a", "1.5", ""),
            ("b", "2.0", "True"),
            ("c", "1.0", ""),
        ]
    assert (tmp_path / "adapters.png").stat().st_size > 1000


def test_a_title_says_how_threads_wait() -> None:
    assert threads_title({}).endswith(" threads")
    assert threads_title({"HOME": "/", "GOMP_SPINCOUNT": "7"}).endswith(" threads, GOMP_SPINCOUNT=7")
