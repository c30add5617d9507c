"""Whose guide is compiled next."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from multilora_engine.guides.guide_turns import GuideJob, GuideTurns
from multilora_engine.request import Guide, Sender

_ARRIVALS = itertools.count()


def job(name: str, num_bytes: int, weight: float = 1.0) -> GuideJob:
    arrival = next(_ARRIVALS)
    return GuideJob(num_bytes, arrival, Guide("regex", str(arrival)), (), Sender(name=name, weight=weight), 0.0)


def compiled(turns: GuideTurns, seconds_per_byte: float = 1.0) -> list[tuple[str, int]]:
    """All that wait, in the order of their turns; each takes a time that goes by its size."""
    order = []
    while (one := turns.pop()) is not None:
        turns.finish(one, seconds_per_byte * one.num_bytes)
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
        one = turns.pop()
        assert one is not None
        turns.finish(one, 5.0)
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


def popped(turns: GuideTurns) -> GuideJob:
    one = turns.pop()
    assert one is not None
    return one


def test_a_known_sender_has_one_guide_compiled_at_a_time() -> None:
    turns = GuideTurns()
    for name in ("a", "a", "b"):
        turns.add(job(name, 3))
    first, second = popped(turns), popped(turns)
    assert {first.sender.name, second.sender.name} == {"a", "b"}
    assert turns.pop() is None
    turns.finish(second, 1.0)
    assert (turns.pop() is None) == (second.sender.name == "b")


def test_senders_that_cannot_be_told_apart_have_several_guides_compiled_at_a_time() -> None:
    turns = GuideTurns()
    for num_bytes in (3, 4, 5):
        turns.add(job("", num_bytes))
    assert [popped(turns).num_bytes for _ in range(3)] == [3, 4, 5]


def test_of_the_same_guide_one_is_compiled_and_the_others_wait_for_what_becomes_of_it() -> None:
    turns = GuideTurns()
    same = [job("", 3) for _ in range(3)]
    for one in same:
        one.guide = Guide("json")
        turns.add(one)
    turns.add(job("", 9))
    first, other = popped(turns), popped(turns)
    assert (first.num_bytes, other.num_bytes) == (3, 9)
    assert turns.pop() is None
    turns.finish(first, 1.0)
    assert popped(turns).num_bytes == 3


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 9), st.booleans()), max_size=40))
def test_whatever_ends_in_whatever_order_every_guide_gets_its_turn_once(jobs: list[tuple[str, int, bool]]) -> None:
    turns = GuideTurns()
    running: list[GuideJob] = []
    done: list[GuideJob] = []
    for name, num_bytes, ends_one in jobs:
        turns.add(job(name, num_bytes))
        if (one := turns.pop()) is not None:
            running.append(one)
        if ends_one and running:
            done.append(running.pop(num_bytes % len(running)))
            turns.finish(done[-1], num_bytes)
    while running or len(turns):
        while (one := turns.pop()) is not None:
            running.append(one)
        done.append(running.pop())
        turns.finish(done[-1], 1.0)
    assert sorted((one.sender.name, one.num_bytes) for one in done) == sorted((name, size) for name, size, _ in jobs)
