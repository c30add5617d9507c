"""Whose guide is compiled next."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from multilora_engine.request import Guide, Sender
from multilora_engine.sampling.guide_turns import GuideJob, GuideTurns

_ARRIVALS = itertools.count()


def job(name: str, num_bytes: int, weight: float = 1.0) -> GuideJob:
    return GuideJob(num_bytes, next(_ARRIVALS), Guide("json"), (), Sender(name=name, weight=weight), 0.0)


def compiled(turns: GuideTurns, seconds_per_byte: float = 1.0) -> list[tuple[str, int]]:
    """All that wait, in the order of their turns; each takes a time that goes by its size."""
    order = []
    while len(turns):
        one = turns.pop()
        turns.charge(one.sender, seconds_per_byte * one.num_bytes)
        order.append((one.sender.name, one.num_bytes))
    return order


def test_of_one_sender_the_smallest_goes_first() -> None:
    turns = GuideTurns()
    for num_bytes in (9, 8, 2, 7, 2):
        turns.add(job("a", num_bytes))
    assert compiled(turns) == [("a", 2), ("a", 2), ("a", 7), ("a", 8), ("a", 9)]


def test_a_heavier_sender_gets_more_time() -> None:
    turns = GuideTurns()
    for _ in range(8):
        turns.add(job("light", 4))
        turns.add(job("heavy", 4, weight=3.0))
    first = [name for name, _ in compiled(turns)[:8]]
    assert first.count("heavy") == 6


def test_a_sender_does_not_save_up_while_it_has_no_guides() -> None:
    turns = GuideTurns()
    for _ in range(10):
        turns.add(job("busy", 5))
    for _ in range(10):
        turns.charge(turns.pop().sender, 5.0)
    for _ in range(4):
        turns.add(job("busy", 5))
        turns.add(job("idle until now", 5))
    assert [name for name, _ in compiled(turns)[:4]].count("busy") >= 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=60))
def test_while_two_senders_wait_their_times_differ_by_no_more_than_a_guide_each(
    jobs: list[tuple[str, int]],
) -> None:
    turns = GuideTurns()
    for name, num_bytes in jobs:
        turns.add(job(name, num_bytes))
    left = {name: sum(one == name for one, _ in jobs) for name in "abc"}
    seconds = dict.fromkeys("abc", 0)
    for name, num_bytes in compiled(turns):
        seconds[name] += num_bytes
        left[name] -= 1
        waiting = [seconds[other] for other in "abc" if left[other]]
        assert max(waiting, default=0) - min(waiting, default=0) <= 2 * 9
    assert sum(left.values()) == 0
