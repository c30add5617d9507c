"""Tables of the server's benchmark are those that its page has."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import serving_tables
from benchmarks.serving_tables import PAGE, load_table, measurement, throughput_table, write_tables
from marked_tables import read_table
from multilora_client.bench.load import Load, Sample
from multilora_client.bench.report import Stage
from multilora_client.bench.workload import Job, Target

RATES = {"1 at once, no adapter": [46.12, 45.0, 47.0], "1 at once, all different": [42.7], "through ensemble": [9.0]}


def stage(rate: float, times: tuple[float, ...], error: str = "") -> Stage:
    sample = Sample(Job(Target(), "x"), 0.0, 0.0, times, times[-1], "text", 1, 4, error)
    return Stage(Load(rate, is_open=True), [sample])


def test_throughput_is_the_median_of_each_mix() -> None:
    lines = throughput_table(RATES, [1]).splitlines()
    assert lines[0] == "| requests at once | no adapter | all different | |"
    assert lines[2] == "| 1 | 46.1 | 42.7 | tokens/s |"


def test_rates_have_no_exponents() -> None:
    rates = {"1 at once, no adapter": [1029.6], "8 at once, no adapter": [0.42]}
    assert throughput_table(rates, [1, 8]).splitlines()[2:] == ["| 1 | 1,030 | tokens/s |", "| 8 | 0.42 | tokens/s |"]


def test_times_of_the_load_are_in_their_units_and_missing_ones_are_said() -> None:
    lines = load_table([stage(4, (0.267, 0.324)), stage(6, (14.7, 14.7), error="TIMED_OUT")]).splitlines()
    assert lines[2:] == ["| 4 | 267 ms | 267 ms | 57 ms | 57 ms |", "| 6 | – | – | – | – |"]


def test_headings_are_those_of_the_page() -> None:
    """The plots find the columns by them."""
    assert load_table([stage(4, (0.3,))]).splitlines()[:2] == read_table(PAGE, "load").splitlines()[:2]
    mixes = {measurement(1, mix): [1.0] for mix in ("no adapter", "one adapter", "all different")}
    assert throughput_table(mixes, [1]).splitlines()[:2] == read_table(PAGE, "throughput").splitlines()[:2]


def test_what_was_not_measured_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, drawn = tmp_path / "page.md", list[Path]()
    page.write_text(PAGE.read_text())
    monkeypatch.setattr(serving_tables, "PAGE", page)
    monkeypatch.setattr(serving_tables, "write_plots", drawn.append)
    write_tables({}, [1], [stage(4, (0.3, 0.4))], "By a test.")
    assert "| 4 | 300 ms |" in read_table(page, "load")
    assert read_table(page, "load").endswith(" |\n\nBy a test.\n")
    assert read_table(page, "throughput") == read_table(PAGE, "throughput")
    assert drawn == [page]
