"""`FreePages` against a set of numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from multilora_engine.lora.free_pages import FreePages
from multilora_wire.layout import PageShape

SHAPES = st.builds(
    lambda runs, single: PageShape(single, tuple(sorted(runs, reverse=True))),
    st.lists(st.integers(2, 5), max_size=3),
    st.integers(0, 4),
).filter(lambda shape: shape.num_pages > 0)


def longest_extent(free: set[int]) -> int:
    best = length = 0
    for page in sorted(free):
        length = length + 1 if page - 1 in free else 1
        best = max(best, length)
    return best


class PagesMachine(RuleBasedStateMachine):
    """Allocates, frees and evicts; the model is the set of free pages and what each owner has."""

    @initialize(count=st.integers(1, 24))
    def start(self, count: int) -> None:
        self.pages = FreePages(count)
        self.free = set(range(count))
        self.owned: list[tuple[PageShape, list[int]]] = []

    @rule(shape=SHAPES)
    def allocate(self, shape: PageShape) -> None:
        if not self.pages.fits(shape):
            longest = longest_extent(self.free)
            assert shape.num_pages > len(self.free) or len(shape.runs) > 1 or shape.runs[0] > longest
            return
        pages = self.pages.allocate(shape)
        assert len(pages) == shape.num_pages
        start = 0
        for length in shape.runs:
            assert all(later == page + 1 for page, later in pairwise(pages[start : start + length]))
            start += length
        assert set(pages) <= self.free
        self.free -= set(pages)
        self.owned.append((shape, pages))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owned:
            _, pages = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
            self.pages.free(data.draw(st.permutations(pages)))
            self.free |= set(pages)

    @rule(shape=SHAPES, data=st.data())
    def evict_for(self, shape: PageShape, data: st.DataObject) -> None:
        """What `victims` names makes room, and nothing else is named than candidates."""
        candidates = [i for i in range(len(self.owned)) if data.draw(st.booleans())]
        victims = self.pages.victims(shape, ((i, self.owned[i][1]) for i in candidates))
        everything = [self.owned[i][1] for i in candidates]
        assert victims is not None or not self.pages.fits_with(shape, everything)
        for i in sorted(victims or (), reverse=True):
            assert i in candidates
            _, pages = self.owned.pop(i)
            self.pages.free(pages)
            self.free |= set(pages)
        assert victims is None or self.pages.fits(shape)

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "pages"):
            self.pages.check_integrity(self.owned)
            assert self.pages.num_free == len(self.free)


PagesMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_pages_are_never_lost_shared_or_torn_apart = PagesMachine.TestCase


@settings(max_examples=200, deadline=None)
@given(shape=SHAPES)
def test_an_empty_pool_holds_every_shape_of_its_size(shape: PageShape) -> None:
    assert FreePages(shape.num_pages).fits(shape)
    assert not FreePages(shape.num_pages - 1).fits(shape)


def test_enough_pages_without_a_run_are_not_enough() -> None:
    pages = FreePages(6)
    taken = pages.allocate(PageShape(6))
    pages.free(taken[::2])
    assert pages.num_free == 3
    assert pages.fits(PageShape(3))
    assert not pages.fits(PageShape(0, (2,)))


def test_single_pages_leave_long_extents_to_runs() -> None:
    pages = FreePages(10)
    taken = pages.allocate(PageShape(10))
    pages.free([taken[0], *taken[3:8]])
    assert pages.allocate(PageShape(1)) == [taken[0]]
    assert pages.fits(PageShape(0, (5,)))


def test_a_run_comes_from_the_shortest_extent_that_holds_it() -> None:
    pages = FreePages(12)
    taken = pages.allocate(PageShape(12))
    pages.free([*taken[0:6], *taken[8:11]])
    assert pages.allocate(PageShape(0, (3,))) == taken[8:11]
    assert pages.fits(PageShape(0, (6,)))


def test_single_pages_evict_no_more_than_the_first_candidates() -> None:
    pages = FreePages(4)
    owners = [pages.allocate(PageShape(1)) for _ in range(4)]
    looked_at = []

    def candidates() -> object:
        for number, owned in enumerate(owners):
            looked_at.append(number)
            yield number, owned

    assert pages.victims(PageShape(2), candidates()) == [0, 1]  # type: ignore[arg-type]
    assert looked_at == [0, 1]
    pages.free(owners[3])
    looked_at.clear()
    assert pages.victims(PageShape(1), candidates()) == []  # type: ignore[arg-type]
    assert looked_at == []


@pytest.mark.parametrize(("order", "victims"), [([0, 1, 2, 3, 4], [0, 1]), ([0, 2, 4, 3, 1], [2, 3])])
def test_only_owners_that_stand_in_the_way_of_a_run_go(order: list[int], victims: list[int]) -> None:
    """Used least recently first: what is evicted before a run is found, and is no part of it, stays."""
    pages = FreePages(5)
    owners = [pages.allocate(PageShape(1)) for _ in range(5)]
    assert sorted(pages.victims(PageShape(0, (2,)), ((i, owners[i]) for i in order)) or ()) == victims


def test_pages_that_are_lost_or_torn_apart_are_seen() -> None:
    pages = FreePages(4)
    owned = pages.allocate(PageShape(1, (2,)))
    pages.check_integrity([(PageShape(1, (2,)), owned)])
    with pytest.raises(AssertionError, match="lost or shared"):
        pages.check_integrity([(PageShape(0, (2,)), owned[:2])])
    with pytest.raises(AssertionError, match="PageShape"):
        pages.check_integrity([(PageShape(1, (2,)), [owned[0], owned[2], owned[1]])])
