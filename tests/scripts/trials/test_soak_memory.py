from __future__ import annotations

import numpy as np
import pytest

from trials.soak_memory import SHARED_MEMORY, SHORTEST_JUDGED_S, Stretch, fit

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


def test_the_warm_up_is_left_out() -> None:
    stretch = Stretch([3600.0 * i for i in range(8)], {SHARED_MEMORY: [0, 0, 0, *[MIB] * 5]})
    assert stretch.line(SHARED_MEMORY).slope == 0.0


@pytest.mark.parametrize(
    ("seconds", "growth", "verdict", "growing"),
    [
        (SHORTEST_JUDGED_S, 0, "flat", []),
        (SHORTEST_JUDGED_S, 5 * MIB, "GROWS", ["engine"]),
        (SHORTEST_JUDGED_S - 1, 5 * MIB, "too short", []),
    ],
)
def test_only_a_long_stretch_is_judged_wherever_in_the_soak_it_lies(
    seconds: float, growth: int, verdict: str, growing: list[str]
) -> None:
    stretch = Stretch()
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        stretch.add(3000.0 + share * seconds, {"engine": 10 * MIB + int(share * growth)})
    assert stretch.verdict("engine") == verdict
    assert stretch.growing == growing


def test_a_stretch_without_a_measurement_is_not_judged() -> None:
    assert Stretch().growing == []
