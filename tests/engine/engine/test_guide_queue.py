"""The queue with a compiler that waits until a test lets it go on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from random import Random
from typing import cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from support.fronts import TIMEOUT_S, generation_request

from multilora_engine.engine import guide_queue
from multilora_engine.engine.accounts import Accounts
from multilora_engine.engine.guide_queue import GuideJob, GuideQueue, GuidesInUse, GuideTurns
from multilora_engine.errors import GuidesFull, GuideTimeout, InternalError, InvalidRequest, RequestError
from multilora_engine.guides.guide_sandbox import GuideWatch
from multilora_engine.guides.guided import CompiledGuide, GuideMatcher
from multilora_engine.request import Guide, Sender
from multilora_engine.sequences.sequence import Sequence
from multilora_engine.text.text_stream import TextStream


def guide(num_bytes: int) -> Guide:
    return Guide("regex", "x" * num_bytes)


def sequence(sender: str = "one") -> Sequence:
    request = msgspec.structs.replace(generation_request("r", [1]), sender=Sender(name=sender))
    return Sequence(request, 0, None, cast(TextStream, None), Random(0), max_output_tokens=1)


class GatedCompiler:
    """Makes the guide itself its matcher. A guide of 13 bytes is malformed, one of 14 is a bug."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.begun_with: list[int] = []
        self.compiled: list[int] = []
        self.is_started = self.is_closed = False

    def start(self) -> None:
        self.is_started = True

    def close(self) -> None:
        self.is_closed = True

    def matcher(self, guide: Guide, end_tokens: tuple[int, ...], watch: GuideWatch | None = None) -> GuideMatcher:
        self.begun_with.append(guide.num_bytes)
        self.begun.release()
        assert self.gate.acquire(timeout=TIMEOUT_S)
        self.compiled.append(guide.num_bytes)
        if guide.num_bytes == 13:
            raise InvalidRequest("malformed")
        if guide.num_bytes == 14:
            raise RuntimeError("a bug")
        return cast(GuideMatcher, guide)


@pytest.fixture
def compiler() -> GatedCompiler:
    return GatedCompiler()


@pytest.fixture
def guides(compiler: GatedCompiler) -> Iterator[GuideQueue]:
    guides = GuideQueue(lambda: compiler, Accounts())
    yield guides
    compiler.gate.release(100)
    guides.close()


def results(guides: GuideQueue, number: int) -> dict[Sequence, GuideMatcher | RequestError]:
    """Of so many sequences, which are given up then."""
    found: dict[Sequence, GuideMatcher | RequestError] = {}
    while len(found) < number:
        guides.wait(TIMEOUT_S)
        for one, result in guides.poll():
            guides.give_up(one)
            found[one] = result
    return found


def test_small_guides_are_compiled_before_large_ones_that_came_first(
    guides: GuideQueue, compiler: GatedCompiler
) -> None:
    guides.add(sequence(), guide(5), ())
    assert compiler.begun.acquire(timeout=TIMEOUT_S)
    for num_bytes in (9, 8, 2, 7, 2):
        guides.add(sequence(), guide(num_bytes), ())
    compiler.gate.release(6)
    results(guides, 6)
    assert compiler.compiled == [5, 2, 2, 7, 8, 9]


def test_a_client_with_many_small_guides_does_not_keep_another_ones_large_guide_waiting(
    guides: GuideQueue, compiler: GatedCompiler
) -> None:
    guides.add(sequence("many"), guide(1), ())
    assert compiler.begun.acquire(timeout=TIMEOUT_S)
    for num_bytes in (2, 3, 4):
        guides.add(sequence("many"), guide(num_bytes), ())
    guides.add(sequence("one"), guide(50), ())
    assert compiler.begun.acquire(timeout=TIMEOUT_S)
    assert sorted(compiler.begun_with) == [1, 50]
    compiler.gate.release(5)
    results(guides, 5)


def test_a_compiler_that_is_warm_is_not_made_again(compiler: GatedCompiler) -> None:
    made: list[GatedCompiler] = []

    def make() -> GatedCompiler:
        made.append(compiler)
        return compiler

    guides = GuideQueue(make, Accounts())
    guides.warm_up()
    guides.add(sequence(), guide(3), ())
    compiler.gate.release(1)
    results(guides, 1)
    guides.close()
    assert made == [compiler]
    assert (compiler.is_started, compiler.is_closed) == (True, True)


def test_each_sequence_gets_its_own_result_or_error(guides: GuideQueue, compiler: GatedCompiler) -> None:
    sequences = [sequence() for _ in range(3)]
    for one, num_bytes in zip(sequences, (3, 13, 14), strict=True):
        guides.add(one, guide(num_bytes), ())
    compiler.gate.release(3)
    found = results(guides, 3)
    assert found[sequences[0]] == guide(3)
    assert isinstance(found[sequences[1]], InvalidRequest)
    assert isinstance(found[sequences[2]], InternalError)


def test_who_gave_up_is_not_compiled_for(guides: GuideQueue, compiler: GatedCompiler) -> None:
    first, given_up, last = sequence(), sequence(), sequence()
    guides.add(first, guide(1), ())
    assert compiler.begun.acquire(timeout=TIMEOUT_S)
    guides.add(given_up, guide(2), ())
    guides.add(last, guide(3), ())
    assert guides.give_up(given_up)
    assert not guides.give_up(given_up)
    assert len(guides) == 2
    compiler.gate.release(2)
    assert results(guides, 2) == {first: guide(1), last: guide(3)}
    assert compiler.compiled == [1, 3]


def test_a_guide_that_is_not_compiled_in_time_is_an_error(
    compiler: GatedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide_queue, "COMPILE_TIMEOUT_S", 1e-9)
    guides, waiting = GuideQueue(lambda: compiler, Accounts()), sequence()
    guides.add(waiting, guide(6), ())
    ((found, error),) = guides.poll()
    assert found is waiting
    assert isinstance(error, GuideTimeout)
    guides.give_up(waiting)
    compiler.gate.release(1)
    guides.close()


class Turns(GuideTurns):
    """Whose jobs have the accounts of their senders."""

    def __init__(self) -> None:
        super().__init__()
        self.accounts = Accounts()
        self._arrivals = itertools.count()

    def wait(self, name: str, num_bytes: int, weight: float = 1.0, text: str = "") -> GuideJob:
        arrival = next(self._arrivals)
        one, sender = Guide("regex", text or str(arrival)), Sender(name=name, weight=weight)
        job = GuideJob(num_bytes, arrival, one, (), sender, self.accounts.open_client(sender), 0.0)
        self.add(job)
        return job

    def popped(self) -> GuideJob:
        one = self.pop()
        assert one is not None
        return one

    def compile_all(self) -> list[tuple[str, int]]:
        """All that wait, in the order of their turns; each takes a second for each of its bytes."""
        order = []
        while (one := self.pop()) is not None:
            self.finish(one, one.num_bytes)
            order.append((one.sender.name, one.num_bytes))
        return order


def test_of_one_sender_the_smallest_goes_first() -> None:
    turns = Turns()
    for num_bytes in (9, 8, 2, 7, 2):
        turns.wait("a", num_bytes)
    assert turns.compile_all() == [("a", 2), ("a", 2), ("a", 7), ("a", 8), ("a", 9)]


def test_a_heavier_sender_gets_more_time() -> None:
    turns = Turns()
    for _ in range(8):
        turns.wait("light", 4)
        turns.wait("heavy", 4, weight=3.0)
    assert [name for name, _ in turns.compile_all()[:8]].count("heavy") == 6


def test_a_sender_that_has_used_the_engines_thread_for_long_waits_for_one_that_has_not() -> None:
    turns = Turns()
    turns.wait("busy", 1).account.step_s = 9.0
    for _ in range(3):
        turns.wait("other", 5)
    assert turns.compile_all() == [("other", 5), ("other", 5), ("busy", 1), ("other", 5)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=60))
def test_while_two_senders_wait_their_times_differ_by_no_more_than_a_guide_each(
    jobs: list[tuple[str, int]],
) -> None:
    turns = Turns()
    for name, num_bytes in jobs:
        turns.wait(name, num_bytes)
    left = {name: sum(one == name for one, _ in jobs) for name in "abc"}
    seconds = dict.fromkeys("abc", 0)
    for name, num_bytes in turns.compile_all():
        seconds[name] += num_bytes
        left[name] -= 1
        waiting = [seconds[other] for other in "abc" if left[other]]
        assert max(waiting, default=0) - min(waiting, default=0) <= 2 * 9
    assert sum(left.values()) == 0


def test_a_known_sender_has_one_guide_compiled_at_a_time() -> None:
    turns = Turns()
    for name in ("a", "a", "b"):
        turns.wait(name, 3)
    first, second = turns.popped(), turns.popped()
    assert {first.sender.name, second.sender.name} == {"a", "b"}
    assert turns.pop() is None
    turns.finish(second, 1.0)
    assert (turns.pop() is None) == (second.sender.name == "b")


def test_senders_that_cannot_be_told_apart_have_several_guides_compiled_at_a_time() -> None:
    turns = Turns()
    for num_bytes in (3, 4, 5):
        turns.wait("", num_bytes)
    assert [turns.popped().num_bytes for _ in range(3)] == [3, 4, 5]


def test_of_the_same_guide_one_is_compiled_and_the_others_wait_for_what_becomes_of_it() -> None:
    turns = Turns()
    for _ in range(3):
        turns.wait("", 3, text="the same")
    turns.wait("", 9)
    first, other = turns.popped(), turns.popped()
    assert (first.num_bytes, other.num_bytes) == (3, 9)
    assert turns.pop() is None
    turns.finish(first, 1.0)
    assert turns.popped().num_bytes == 3


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 9), st.booleans()), max_size=40))
def test_whatever_ends_in_whatever_order_every_guide_gets_its_turn_once(jobs: list[tuple[str, int, bool]]) -> None:
    turns = Turns()
    running: list[GuideJob] = []
    done: list[GuideJob] = []
    for name, num_bytes, ends_one in jobs:
        turns.wait(name, num_bytes)
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


def matcher(kept_bytes: int, copy_bytes: int = 0) -> GuideMatcher:
    """Of a model with 32 tokens, so that its mask takes 4 bytes."""
    tokens = np.full(1, -1, np.int32)
    compiled = CompiledGuide(cast(LLMatcher, FakeMatcher()), tokens, False, kept_bytes, copy_bytes)
    return GuideMatcher(compiled, tokens, np.zeros(1, np.int32))


class FakeMatcher:
    def deep_copy(self) -> FakeMatcher:
        return self


def test_a_guide_that_is_not_compiled_counts_its_text_once_from_its_first_sequence_to_its_last() -> None:
    in_use = GuidesInUse(max_bytes=20)
    for one in (guide(4), guide(6), guide(6)):
        in_use.check(one)
        in_use.add(one)
    in_use.check(guide(4))
    with pytest.raises(
        GuidesFull, match=r"the guide takes 1 bytes of memory, other guides in flight 10, and .* 20, half"
    ):
        in_use.check(guide(1))
    in_use.remove(guide(6), None)
    with pytest.raises(GuidesFull):
        in_use.check(guide(1))
    in_use.remove(guide(6), None)
    in_use.check(guide(1))


def test_a_compiled_guide_counts_what_it_keeps_once_and_each_matcher_of_it() -> None:
    in_use = GuidesInUse(max_bytes=1000)
    for _ in range(3):
        in_use.add(guide(10))
    for _ in range(2):
        in_use.compiled(guide(10), matcher(300, 80))
    with pytest.raises(GuidesFull, match=r"the guide takes 394 bytes of memory, other guides in flight 168, "):
        in_use.compiled(guide(10), matcher(300, 80))
    in_use.remove(guide(10), matcher(300, 80))
    in_use.compiled(guide(10), matcher(300, 80))
    in_use.remove(guide(10), matcher(300, 80))
    in_use.remove(guide(10), matcher(300, 80))
    in_use.check(guide(500))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 400), st.integers(0, 50)), max_size=40), st.randoms())
def test_whatever_comes_and_goes_no_more_than_the_limit_is_in_use_and_nothing_stays(
    arrivals: list[tuple[int, int, int]], random: Random
) -> None:
    in_use = GuidesInUse(max_bytes=1000)
    live: list[tuple[Guide, GuideMatcher]] = []
    for num_bytes, kept_bytes, copy_bytes in arrivals:
        in_use.add(guide(num_bytes))
        one = matcher(kept_bytes, copy_bytes)
        try:
            in_use.compiled(guide(num_bytes), one)
            live.append((guide(num_bytes), one))
        except GuidesFull:
            in_use.remove(guide(num_bytes), None)
        used = sum(one.num_bytes for _, one in live if one) + sum(
            max(one.compiled.kept_bytes for each, one in live if each == which and one)
            for which in {g for g, _ in live}
        )
        assert used <= 1000
        if random.random() < 0.3 and live:
            in_use.remove(*live.pop(random.randrange(len(live))))
    for each in live:
        in_use.remove(*each)
    in_use.check(guide(500))


def test_large_guides_leave_room_for_small_ones() -> None:
    in_use = GuidesInUse(max_bytes=1024)
    in_use.add(guide(512))
    with pytest.raises(GuidesFull):
        in_use.check(guide(5))
    in_use.check(guide(4))
