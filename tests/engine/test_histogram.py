from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_engine.histogram import SECONDS, Histogram

OBSERVED = st.lists(st.one_of(st.floats(0, 1000), st.sampled_from(SECONDS)), max_size=50)


def histogram_of(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    return histogram


def test_a_histogram_counts_a_value_at_its_bound_and_those_beyond_all() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1]
    assert histogram.total == 10.0


@given(OBSERVED)
def test_its_observations_make_the_same_histogram(values: list[float]) -> None:
    histogram = histogram_of(values)
    again = histogram_of(list(histogram.observations()))
    assert again.counts == histogram.counts
    assert again.total == pytest.approx(histogram.total, abs=1e-9)


@given(OBSERVED, OBSERVED)
def test_what_was_observed_since_is_the_difference(earlier: list[float], later: list[float]) -> None:
    both = histogram_of(earlier + later)
    assert both.since(histogram_of(earlier)).counts == histogram_of(later).counts
    assert both.since(histogram_of(earlier)).total == pytest.approx(histogram_of(later).total, abs=1e-6)
    assert histogram_of(earlier).plus(histogram_of(later)).counts == both.counts


def test_one_that_has_begun_anew_has_observed_everything_since() -> None:
    anew = histogram_of([0.02])
    assert anew.since(histogram_of([0.02, 0.02, 5.0])) == anew
