"""When an adapter that is missing counts as lost."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints.telling_adapters import MAX_RANK, save_checkpoint
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from trials.serving_load import Load, task_id

NUMBER = 3


@pytest.fixture
def load(tmp_path: Any) -> Load:
    layout = checkpoint_layout(save_checkpoint(tmp_path), MAX_RANK, "float32")
    load = Load("", "", layout, num_clients=1, num_adapters=10)
    load.upload(CLIENT, NUMBER)
    return load


CLIENT: Any = SimpleNamespace(upload=lambda adapter, timeout_s: None)


def test_an_acknowledged_adapter_that_is_missing_is_lost(load: Load) -> None:
    load._note_missing(CLIENT, NUMBER, asked_at=time.monotonic())
    assert load.tally.lost == {NUMBER}


def test_a_damaged_one_is_sent_again_and_missed_by_all_who_asked_before_that(load: Load) -> None:
    load.expect_damage([task_id(NUMBER)])
    asked_at = time.monotonic()
    for _ in range(2):
        load._note_missing(CLIENT, NUMBER, asked_at)
    assert load.tally.seen["uploads"] == 2
    assert load.tally.lost == set()
    load._note_missing(CLIENT, NUMBER, asked_at=time.monotonic())
    assert load.tally.lost == {NUMBER}
