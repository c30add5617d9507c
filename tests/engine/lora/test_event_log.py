from __future__ import annotations

import pytest

from multilora_engine.lora.adapter_events import EventLog


@pytest.mark.parametrize(
    ("since", "events", "num_missed"),
    [(0, ["c", "d", "e"], 2), (1, ["c", "d", "e"], 1), (2, ["c", "d", "e"], 0), (4, ["e"], 0), (5, [], 0), (99, [], 0)],
)
def test_a_log_tells_what_came_later_and_how_much_it_forgot(since: int, events: list[str], num_missed: int) -> None:
    log: EventLog[str] = EventLog(capacity=3)
    for event in "abcde":
        log.append(event)
    piece = log.since(since)
    assert (piece.events, piece.last, piece.num_missed) == (events, 5, num_missed)


def test_a_log_in_which_nothing_happened_is_empty() -> None:
    piece = EventLog[str](capacity=3).since(0)
    assert (piece.events, piece.last, piece.num_missed) == ([], 0, 0)
