from __future__ import annotations

import subprocess
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console
from serving_load import Tally
from soak_serving import SHARED_MEMORY, Samples, conclude, fit, soak

MIB = 1 << 20


def test_a_line_is_the_one_numpy_fits_with_its_standard_error() -> None:
    random = np.random.default_rng(0)
    seconds = np.sort(random.uniform(0, 600, 200))
    sizes = (100 * MIB + seconds * 3000 + random.normal(0, MIB, 200)).astype(int)
    line = fit(list(seconds), list(sizes))
    (slope, _), covariance = np.polyfit(seconds / 3600, sizes / MIB, 1, cov=True)
    assert line.slope == pytest.approx(slope)
    assert line.error == pytest.approx(np.sqrt(covariance[0, 0]), rel=0.2)


def test_error_bars_hold_for_deviations_that_resemble_the_one_before() -> None:
    """Memory that wanders and does not grow: of 300 slopes few are beyond two standard errors."""
    random = np.random.default_rng(2)
    noise = random.normal(0, MIB, (300, 300))
    for i in range(1, 300):
        noise[:, i] += 0.9 * noise[:, i - 1]
    seconds = list(np.arange(0.0, 300.0))
    lines = [fit(seconds, [int(size) for size in row]) for row in noise]
    assert np.mean([abs(line.slope) > 2 * line.error for line in lines]) < 0.12


@pytest.mark.parametrize(("bytes_per_s", "grows"), [(0, False), (50_000, True)])
def test_growth_is_what_the_error_bars_cannot_explain(bytes_per_s: int, grows: bool) -> None:
    random = np.random.default_rng(1)
    seconds = np.arange(0.0, 300.0)
    sizes = 100 * MIB + seconds * bytes_per_s + random.normal(0, MIB, 300)
    assert fit(list(seconds), [int(size) for size in sizes]).grows is grows


@pytest.mark.parametrize(
    ("first", "growth", "grows"), [(10, 0.9, False), (10, 2, True), (300, 2, False), (300, 4, True)]
)
def test_growth_of_less_than_a_mebibyte_or_a_hundredth_an_hour_is_flat(first: int, growth: float, grows: bool) -> None:
    sizes = [int((first + growth * hours) * MIB) for hours in (0.0, 0.5, 1.0)]
    assert fit([0.0, 1800.0, 3600.0], sizes).grows is grows


def test_what_is_constant_has_no_slope_and_no_error() -> None:
    line = fit([0.0, 1.0, 2.0], [5 * MIB] * 3)
    assert (line.first, line.last, line.slope, line.error, line.grows) == (5.0, 5.0, 0.0, 0.0, False)


@pytest.mark.parametrize(
    ("samples", "tally", "complaint"),
    [
        (Samples([0.0, 1.0], {"engine": [MIB, MIB]}), Tally(), ""),
        (Samples([0.0], {"engine": [MIB]}, ["engine"]), Tally(), "engine died"),
        (Samples([0.0, 1.0, 2.0], {"engine": [MIB, 2 * MIB, 3 * MIB]}), Tally(), "engine grows"),
        (Samples([0.0, 1.0], {"engine": [MIB, MIB]}), Tally(wrong=["adapter 3 answered <1>"]), "adapter 3 answered"),
        (Samples([0.0, 1.0], {"engine": [MIB, MIB]}), Tally(lost={4}), "1 adapters are lost"),
        (Samples([0.0, 1.0], {"engine": [MIB, MIB]}), Tally(stuck=2), "2 requests were stuck"),
    ],
)
def test_the_last_line_tells_what_must_not_be(samples: Samples, tally: Tally, complaint: str) -> None:
    console = Console(file=StringIO(), width=110)
    assert conclude(samples, tally, console) is not bool(complaint)
    last = console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined]
    assert last.startswith("FAILED: " + complaint if complaint else "PASSED")


def test_the_warm_up_is_left_out() -> None:
    samples = Samples([float(i) for i in range(8)], {SHARED_MEMORY: [0, 0, *[MIB] * 6]})
    assert samples.line(SHARED_MEMORY).slope == 0.0


def test_a_process_that_dies_ends_the_soak_and_is_named(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as cat:
        processes = {"engine": psutil.Process(cat.pid)}
    server = SimpleNamespace(processes=lambda: processes, shared_memory=tmp_path)
    scene: Any = SimpleNamespace(server=server, load=SimpleNamespace(running=nullcontext))
    samples = Samples()
    soak(scene, samples, 60.0, 1.0, print)
    assert samples.dead == ["engine"]
