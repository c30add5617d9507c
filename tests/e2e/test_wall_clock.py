"""`multilora-serve` under load while its wall clock is set. A selection; scripts/run inject_faults has one more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trials.inject_faults import FAULTS, Fault, Scene, inject, stage

SELECTED = [fault for fault in FAULTS if fault.name.startswith("wall clock")]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with stage(num_clients=4, directory=tmp_path_factory.mktemp("clock"), has_own_clock=True) as scene:
        yield scene


@pytest.mark.parametrize("fault", SELECTED, ids=lambda fault: fault.name)
def test_a_clock_that_is_set_costs_no_more_than_it_explains(scene: Scene, fault: Fault) -> None:
    assert inject(fault, scene).complaints == []
