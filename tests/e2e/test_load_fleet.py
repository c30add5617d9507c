"""A fleet in network namespaces under load: workers die, one is cut off, adapters move meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from servers.machines import can_make_machines
from trials.fleet_picture import draw
from trials.load_fleet import FAULTS, started_trial

pytest.importorskip("dynamo.common.backend", reason="ai-dynamo is not installed")
pytestmark = pytest.mark.long(
    reason="a fleet of five processes is hurt for two minutes; tests/engine/dynamo has shorter tests"
)


def test_no_answer_is_one_that_nobody_may_give(tmp_path: Path) -> None:
    if not can_make_machines():
        pytest.skip("this user may not make network namespaces")
    with started_trial(3, 100, num_requests=60, num_clients=6, namespaces=True, seed=2) as trial:
        tallies = list(trial.phases(Console(quiet=True)))
        operated = trial.operator.done
    draw(tallies, trial.begun, trial.names, tmp_path / "picture.png")
    faults = [one for tally in tallies for one in tally.asked if one.outcome in FAULTS]
    assert faults == []
    again = tallies[-1].outcomes
    assert again["right"] + again["absent"] == 200, "every adapter answers again, through both fronts"
    assert any(what.startswith("move") for what in operated), "loads follow unloads, for which a fast run has no time"
    assert len(trial.names) == 5
