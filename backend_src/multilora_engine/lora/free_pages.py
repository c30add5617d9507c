"""`FreePages`: which of a fixed number of pages are free, in runs as long as freeing them allows.

An *extent* is a run of consecutive free pages between pages that are owned. Runs of an adapter come from the shortest
extent that holds them, single pages from the shortest extents there are: long extents stay for long runs. Freed pages
join their neighbours at once.

Kernels address a piece by one offset, so a piece that spans pages needs consecutive ones. A page table in the kernels
would allow any pages, and cost every step a load for each page of every matrix. With runs a step costs no more,
and a tier may have to evict more than the pages that it needs: see `victims`.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

import torch

from multilora_engine.errors import ConfigError
from multilora_kernels import HugePages, MemoryAhead
from multilora_kernels.huge_pages import HUGE_PAGE_BYTES
from multilora_wire.layout import PageShape

Owner = TypeVar("Owner")


class FreePages:
    """Pages `0 .. count - 1`, each free or owned by exactly one owner.

    Finding an extent costs the logarithm of how many different lengths there are; all else costs only the pages asked
    for. Whether a shape fits depends on the lengths of the extents alone.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_free = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._starts: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []
        self._add(0, count)

    def fits(self, shape: PageShape) -> bool:
        """Whether `allocate` finds pages for a shape."""
        if shape.num_pages > self.num_free:
            return False
        return len(shape.runs) == 0 or _take_runs(self._extent_lengths(), shape.runs)

    def fits_with(self, shape: PageShape, freed: Iterable[Sequence[int]]) -> bool:
        """Whether a shape fits once the pages of these owners are free."""
        return self._with(freed).fits(shape)

    def victims(self, shape: PageShape, candidates: Iterable[tuple[Owner, Sequence[int]]]) -> list[Owner] | None:
        """The owners that must go for a shape to fit, in the order of `candidates`; None if all are not enough.

        Only as many candidates are looked at as are needed. Owners that stand before another victim and have no part in
        the runs that their going makes room for are spared.
        """
        if self.fits(shape):
            return []
        after = self._with(()) if shape.runs else None
        chosen: list[tuple[Owner, Sequence[int]]] = []
        num_free = self.num_free
        for owner, pages in candidates:
            chosen.append((owner, pages))
            num_free += len(pages)
            if after is not None:
                after.free(pages)
            if num_free >= shape.num_pages and (after is None or after.fits(shape)):
                return [owner for owner, _ in self._needed(chosen, shape, after)]
        return None

    def allocate(self, shape: PageShape) -> list[int]:
        """Pages that nobody else has: the runs, longest first, then single pages. The shape must fit."""
        assert self.fits(shape), f"{shape} wanted, {self.num_free} free in extents of {self._lengths}"
        runs = [self._take_run(length) for length in shape.runs]
        return [*chain.from_iterable(runs), *self._take_single(shape.num_single)]

    def free(self, pages: Sequence[int]) -> None:
        for start, end in _extents(pages):
            self._join(start, end)

    def check_integrity(self, owned: Iterable[tuple[PageShape, Sequence[int]]]) -> None:
        """Every page is free or owned, by one owner, once; and runs are consecutive. `owned`: of each owner."""
        places = [page for start, end in self._end_of.items() for page in range(start, end)]
        for shape, pages in owned:
            places += pages
            assert len(pages) == shape.num_pages, f"{shape} has {len(pages)} pages"
            assert all(run[-1] - run[0] == len(run) - 1 for run in _runs(shape, pages)), f"{shape}: {pages}"
        assert sorted(places) == list(range(self.count)), f"pages lost or shared: {sorted(places)}"
        assert self.num_free == sum(end - start for start, end in self._end_of.items())
        assert {end: start for start, end in self._end_of.items()} == self._start_of
        assert not self._end_of.keys() & self._start_of.keys(), "neighbours have not joined"
        lengths = sorted(end - start for start, end in self._end_of.items())
        assert lengths == self._extent_lengths()
        assert sorted(self._starts) == self._lengths

    def _needed(
        self, chosen: list[tuple[Owner, Sequence[int]]], shape: PageShape, after: FreePages | None
    ) -> list[tuple[Owner, Sequence[int]]]:
        """The owners in `chosen` whose pages a shape would take; all of them if it needs the others to go, too."""
        if after is None:
            return chosen
        taken = set(after.allocate(shape))
        needed = [(owner, pages) for owner, pages in chosen if not taken.isdisjoint(pages)]
        return needed if self.fits_with(shape, (pages for _, pages in needed)) else chosen

    def _with(self, freed: Iterable[Sequence[int]]) -> FreePages:
        """A copy in which these pages are free, too."""
        copy = FreePages(0)
        copy.count = self.count
        for start, end in self._end_of.items():
            copy._add(start, end)
        for pages in freed:
            copy.free(pages)
        return copy

    def _extent_lengths(self) -> list[int]:
        """The lengths of all extents, ascending."""
        return [length for length in self._lengths for _ in self._starts[length]]

    def _take_run(self, length: int) -> range:
        start = next(reversed(self._starts[self._lengths[bisect_left(self._lengths, length)]]))
        self._split(start, length)
        return range(start, start + length)

    def _take_single(self, count: int) -> Iterator[int]:
        while count > 0:
            shortest = self._lengths[0]
            start = next(reversed(self._starts[shortest]))
            length = min(shortest, count)
            self._split(start, length)
            yield from range(start, start + length)
            count -= length

    def _split(self, start: int, length: int) -> None:
        """Take the first `length` pages of an extent."""
        end = self._end_of[start]
        self._remove(start, end)
        self._add(start + length, end)

    def _join(self, start: int, end: int) -> None:
        """Add an extent, joined with the extents that it touches."""
        if start in self._start_of:
            before = self._start_of[start]
            self._remove(before, start)
            start = before
        if end in self._end_of:
            after = self._end_of[end]
            self._remove(end, after)
            end = after
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        length = end - start
        if length == 0:
            return
        if length not in self._starts:
            self._starts[length] = {}
            insort(self._lengths, length)
        self._starts[length][start] = None
        self._end_of[start], self._start_of[end] = end, start
        self.num_free += length

    def _remove(self, start: int, end: int) -> None:
        length = end - start
        del self._end_of[start], self._start_of[end], self._starts[length][start]
        if not self._starts[length]:
            del self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self.num_free -= length


def _take_runs(lengths: list[int], runs: Sequence[int]) -> bool:
    """Whether runs, one after another, find extents in ascending `lengths`, which are used up."""
    for run in runs:
        place = bisect_left(lengths, run)
        if place == len(lengths):
            return False
        rest = lengths.pop(place) - run
        if rest:
            insort(lengths, rest)
    return True


def _extents(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs of consecutive pages, as (first, after the last)."""
    if not pages:
        return
    ordered = sorted(pages)
    start = previous = ordered[0]
    for page in ordered[1:]:
        if page != previous + 1:
            yield start, previous + 1
            start = page
        previous = page
    yield start, previous + 1


def _runs(shape: PageShape, pages: Sequence[int]) -> Iterator[Sequence[int]]:
    """The pages of each run of a shape."""
    start = 0
    for length in shape.runs:
        yield pages[start : start + length]
        start += length


_AHEAD_BYTES = 64 << 20
"""Memory that is taken before it is used: some adapters that arrive one right after the other."""


class PagePool(FreePages):
    """`storage` is uint8 [count, page_bytes]: page p is row p, so consecutive pages are consecutive memory.

    memory: of a CPU's pages, taken ahead of their use; None for a GPU's, and for pages that are locked for its copies.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device, pin_memory: bool = False) -> None:
        super().__init__(num_pages)
        self.page_bytes = page_bytes
        shape = (num_pages, page_bytes)
        self.storage = (
            HugePages().zeros(shape, torch.uint8)
            if device.type == "cpu"
            else torch.empty(shape, dtype=torch.uint8, device=device)
        )
        self.memory: MemoryAhead | None = None
        if pin_memory:
            self.storage = _pinned(self.storage)
        elif device.type == "cpu" and self.storage.nbytes:
            num_strides = _AHEAD_BYTES // HUGE_PAGE_BYTES
            self.memory = MemoryAhead(self.storage[None], num_strides_ahead=num_strides, or_all=False)
            self.memory.note_use(0)

    def allocate(self, shape: PageShape) -> list[int]:
        pages = super().allocate(shape)
        if self.memory is not None:
            self.memory.note_use(max(pages, default=-1) + 1)
        return pages

    def views(self, pages: Iterable[int]) -> list[torch.Tensor]:
        """Pages themselves, uint8 [page_bytes] each."""
        return [self.storage[page] for page in pages]


def _pinned(memory: torch.Tensor) -> torch.Tensor:
    """The same memory locked in its place, so that a GPU copies from it by itself. Raises ConfigError.

    torch's own pinned memory is rounded up to a power of two bytes: 33 GiB would take 64. It stays locked until the
    last view of a page is gone, and only then goes back to the system, whose next memory may have the same addresses.
    """
    cudart = torch.cuda.cudart()
    result = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if result != cudart.cudaError.success:
        _forget_error()
        raise ConfigError(
            f"{memory.nbytes} bytes of host memory cannot be locked for the GPU's copies "
            f"({cudart.cudaGetErrorString(result)}); write a smaller lora_cache_host_memory_bytes"
        )
    # Views of a tensor hold its storage, and that holds this; a tensor itself may go before its views.
    lent = (ctypes.c_ubyte * memory.nbytes).from_address(memory.data_ptr())
    weakref.finalize(lent, _unlock, memory).atexit = False
    return torch.frombuffer(lent, dtype=memory.dtype).view(memory.shape)


def _unlock(memory: torch.Tensor) -> None:
    # A copy from it that was begun may not have ended.
    torch.cuda.synchronize()
    cudart = torch.cuda.cudart()
    result = cudart.cudaHostUnregister(memory.data_ptr())
    assert result == cudart.cudaError.success, cudart.cudaGetErrorString(result)


def _forget_error() -> None:
    """Have CUDA forget the error of a call: the next launch of torch would fail for it.

    torch forgets it when a launch of its own has failed for it, and has no other way; so that launch is made here.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
