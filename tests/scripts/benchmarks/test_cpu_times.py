"""Whose CPU time is read, and how much of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.cpu_times import CLIENT, CpuTimes, seconds_between

BUSY = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\nsys.stdin.read()"


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that has another one started, called after the model in its arguments, and waits for its work."""
    child = [sys.executable, "-c", BUSY, "/repository/postprocessing/1/model.py"]
    code = f"import subprocess; subprocess.run({child!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


def test_each_process_is_called_after_what_it_is_and_told_its_cpu_time(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    assert server.stdout.readline() == "done\n"
    seconds = CpuTimes(server.pid).read()
    assert seconds["postprocessing"] >= 0.25
    assert seconds[CLIENT] > 0
    assert len(seconds) == 3


def test_the_difference_is_by_process() -> None:
    assert seconds_between({"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 2.0}) == {"a": 0.5, "b": 0.0}
