"""The report of a GPU in its dry run: tiny shapes in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gpu import parts, report
from repository import REPOSITORY


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    folders = ("scripts", "kernels", "backend_src", "client")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(REPOSITORY / folder) for folder in folders))


def test_the_report_has_what_was_found_whatever_ends_early(tmp_path, monkeypatch):
    monkeypatch.setitem(report.PARTS, "self_test", 0.01)
    results = report.report(["limits", "self_test"], tmp_path, 60, is_dry=True)
    assert results["limits"].end == "done"
    assert results["self_test"].end == "stopped after 0 s"
    assert "| limits | done |" in report.docs_table(results)
    content = json.loads((tmp_path / "gpu_report.json").read_text())
    assert [part["name"] for part in content["parts"]] == ["limits", "self_test"]
    rows = {row["what"] for row in content["parts"][0]["rows"]}
    assert {"memory bandwidth", "host to device", "device to host"} <= rows
    text = (tmp_path / "gpu_report.md").read_text()
    assert "## limits: done" in text
    assert "| memory bandwidth | 1 | GB/s |" in text


def test_a_part_that_fails_says_why_and_one_without_time_that_it_had_none(tmp_path, monkeypatch):
    monkeypatch.setitem(report.PARTS, "nonsense", 60)
    assert "KeyError: 'nonsense'" in report.run_part("nonsense", 60, is_dry=True).end
    assert report.report(["limits"], tmp_path, 0, is_dry=True)["limits"].end.startswith("not started")


def test_the_table_of_a_dry_run_tells_how_far_operators_are_from_the_reference():
    rows = [{"value": error, "unit": report.ERROR_UNIT} for error in (0.1, 0.25)] + [{"value": 3.0, "unit": "ms"}]
    table = report.docs_table({"self_test": report.PartResult("self_test", "done", 5.2, rows)})
    assert table.splitlines()[2] == "| self_test | done | 5 | 1 | 2, the largest error 0.25 of the tolerance |"
    assert "<!-- dry run: begin -->" in report.DOCUMENT.read_text()


def test_wheels_that_this_python_lacks_are_named(monkeypatch):
    monkeypatch.setattr(report, "NEEDED", {"json": "json", "no_such_module": "no-such-wheel"})
    assert report.missing_wheels() == ["no-such-wheel"]


def test_the_tests_of_a_gpu_are_there():
    assert all((REPOSITORY / "tests" / f"{name}.py").exists() for name in parts._TESTS)


@pytest.mark.long(reason="the interpreter takes a second for each kernel of a step")
def test_every_part_runs_from_the_command_line(tmp_path):
    command = [str(REPOSITORY / "scripts" / "gpu_report"), "--dry-run", "--output", str(tmp_path)]
    subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, check=True)
    parts = json.loads((tmp_path / "gpu_report.json").read_text())["parts"]
    assert [part["name"] for part in parts] == list(report.PARTS)
    assert all(part["rows"] for part in parts)
