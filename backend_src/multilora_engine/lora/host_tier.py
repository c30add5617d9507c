"""`HostTier`: packed adapters in host memory, by task id, within a fixed number of pages."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain

import torch

from multilora_engine.histogram import Histogram
from multilora_engine.lora.adapter_state import CachedAdapter, FreedBy, Memory, Version
from multilora_engine.lora.free_pages import PagePool
from multilora_engine.lora.layout import AdapterTraits, PackedAdapter, PackedRow, TableEntries
from multilora_engine.lora.life_cycle import TierStats
from multilora_engine.lora.names import TaskId
from multilora_kernels.huge_pages import give_back
from multilora_wire.adapter_info import Kind
from multilora_wire.layout import PageShape


class EvictionOrder:
    """The adapters that have pages, by the `FreedBy` of these, each kind least recently used first.

    A change of one adapter costs the same however many there are.
    """

    def __init__(self) -> None:
        self._orders: dict[FreedBy, OrderedDict[CachedAdapter, None]] = {kind: OrderedDict() for kind in FreedBy}
        self._num_pages = dict.fromkeys(FreedBy, 0)
        self._kinds: dict[CachedAdapter, FreedBy] = {}

    def update(self, adapter: CachedAdapter) -> None:
        """Put an adapter where its state says: as the most recently used one there if it was elsewhere."""
        kind = adapter.state.freed_by
        if self._kinds.get(adapter) is kind:
            return
        self.discard(adapter)
        self._kinds[adapter] = kind
        self._orders[kind][adapter] = None
        self._num_pages[kind] += len(adapter.pages)

    def discard(self, adapter: CachedAdapter) -> None:
        """Forget an adapter, if it is here."""
        kind = self._kinds.pop(adapter, None)
        if kind is not None:
            del self._orders[kind][adapter]
            self._num_pages[kind] -= len(adapter.pages)

    def touch(self, adapter: CachedAdapter) -> None:
        """Make an adapter the most recently used one of its kind, if it is here."""
        kind = self._kinds.get(adapter)
        if kind is not None:
            self._orders[kind].move_to_end(adapter)

    @property
    def unused(self) -> Iterator[CachedAdapter]:
        """The adapters without users, in the order in which they can leave."""
        for kind in FreedBy:
            if kind is not FreedBy.END_OF_USE:
                yield from self._orders[kind]

    @property
    def num_unused_pages(self) -> int:
        """Pages of the adapters in `unused`."""
        return sum(self._num_pages.values()) - self._num_pages[FreedBy.END_OF_USE]

    def check_integrity(self, adapters: Iterable[CachedAdapter]) -> None:
        """The adapters that have pages, and no others, are where they belong."""
        assert self._kinds == {adapter: adapter.state.freed_by for adapter in adapters if adapter.pages}
        for kind, order in self._orders.items():
            assert all(self._kinds[adapter] is kind for adapter in order)
            assert self._num_pages[kind] == sum(len(adapter.pages) for adapter in order)


@dataclass(frozen=True)
class Arrival:
    """The function that fills an adapter's pages, and the one to call if they are never filled.

    num_lent_pages: of other adapters, which cannot leave before that.
    """

    fill: Callable[[], None]
    discard: Callable[[], None] = lambda: None
    num_lent_pages: int = 0


@dataclass(frozen=True, eq=False)
class Loan:
    """The content of one version of an adapter for a thread that reads it, until `end`.

    rows: may have to be read from the adapter's file, which can fail with OSError or DamagedFile.
    pages: uint8 [page_bytes] each, filled once `rows` is done. Pages that a piece spans are consecutive memory.
    """

    task_id: TaskId
    digest: str
    name: str
    kinds: tuple[Kind, ...]
    rows: Future[list[PackedRow]]
    pages: list[torch.Tensor]
    end: Callable[[], None]


@dataclass(frozen=True, eq=False)
class PlannedAdapter:
    """An adapter that is made of others on another thread, in the pages that it gets.

    begin: gets the pages, uint8 [page_bytes] each, and makes the adapter in them. The future may raise RequestError.
    end: to be called when that has ended, or will never begin; more than once does no harm.
    num_lent_pages: of the others, which stay in memory until then.
    """

    digest: str
    rows: list[PackedRow]
    num_pages: int
    traits: AdapterTraits
    begin: Callable[[Sequence[torch.Tensor]], Future[None]]
    end: Callable[[], None]
    num_lent_pages: int
    entries: TableEntries


class HostTier:
    """Holds every cached adapter, and the *arrivals*, the adapters that wait for room, in the order in which they came.

    Changed only by `LoRAManager` and its parts, each of which tells `update` of an adapter whose state it has changed.
    Only `adapters` and `current` look at all adapters, and, for shapes with runs, `can_hold`, `can_ever_hold` and
    `victims_for`.

    num_held_pages: of the adapters that an operator holds. num_promised_pages: that arrivals wait for. load_seconds: of
    the adapters that were read from disk.
    """

    def __init__(self, num_pages: int, page_bytes: int, pin_memory: bool = False) -> None:
        self.pool = PagePool(num_pages, page_bytes, torch.device("cpu"), pin_memory)
        self._by_task_id: OrderedDict[TaskId, CachedAdapter] = OrderedDict()
        self._retired: dict[CachedAdapter, None] = {}
        self._arrivals: dict[CachedAdapter, Arrival] = {}
        self._order = EvictionOrder()
        self.num_held_pages = 0
        self.num_promised_pages = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0
        self._copies = 0
        self._copy_seconds = 0.0
        self.load_seconds = Histogram()

    def __len__(self) -> int:
        return len(self._by_task_id)

    def get(self, lora_task_id: TaskId) -> CachedAdapter | None:
        """The current version of an adapter."""
        return self._by_task_id.get(lora_task_id)

    def touch(self, adapter: CachedAdapter) -> None:
        """Make an adapter the most recently used one."""
        if not adapter.state.is_retired:
            self._by_task_id.move_to_end(adapter.lora_task_id)
        self._order.touch(adapter)

    def update(self, adapter: CachedAdapter) -> None:
        """The state of an adapter has changed, and with it perhaps the `FreedBy` of its pages."""
        if adapter.pages:
            self._order.update(adapter)

    def victims_for(self, shape: PageShape) -> list[CachedAdapter] | None:
        """The adapters whose pages have to be free for a shape to fit; the soonest free first.

        None if the pages of all unused adapters are not enough.
        """
        if shape.num_pages > self.num_reachable():
            return None
        return self.pool.victims(shape, ((adapter, adapter.pages) for adapter in self._order.unused))

    def can_hold(self, shape: PageShape, replaced: CachedAdapter | None = None) -> bool:
        """Whether a shape fits once all unused adapters have gone, and reads and writes have ended.

        replaced: this version goes, even if an operator holds it.
        """
        if shape.num_pages > self.num_reachable(replaced):
            return False
        unused = (a.pages for a in self.adapters if not a.state.is_wanted or _is_only_held(a, replaced))
        return not shape.runs or self.pool.fits_with(shape, unused)

    def can_ever_hold(self, shape: PageShape, waiting: CachedAdapter | None = None) -> bool:
        """Whether a shape fits beside the adapters that an operator holds, once all requests have ended.

        waiting: the adapter of this shape, which an operator may hold already.
        """
        num_held = self.num_held_pages if waiting is None else self.num_other_held_pages(waiting)
        if shape.num_pages + num_held > self.pool.count:
            return False
        return not shape.runs or self.pool.fits_with(shape, (a.pages for a in self.adapters if not a.state.is_held))

    def num_reachable(self, replaced: CachedAdapter | None = None) -> int:
        """Pages that are free once all unused adapters have gone, and reads and writes have ended.

        replaced: this version goes, even if an operator holds it.
        """
        reachable = self.pool.num_free + self._order.num_unused_pages
        if replaced is not None and _is_only_held(replaced, replaced):
            reachable += len(replaced.pages)
        return reachable

    @property
    def num_arrivals(self) -> int:
        return len(self._arrivals)

    @property
    def arrivals(self) -> Iterator[CachedAdapter]:
        """The adapters that wait for their pages, in the order in which they came."""
        return iter(self._arrivals)

    def num_awaited_pages(self, besides: CachedAdapter) -> int:
        """The most pages that one arrival needs at once, including pages of other adapters that it keeps."""
        awaited = (a.num_pages + arrival.num_lent_pages for a, arrival in self._arrivals.items() if a is not besides)
        return max(awaited, default=0)

    def add(self, adapter: CachedAdapter, arrival: Arrival) -> None:
        """Make an adapter the current version of its task id, and let it wait for its pages."""
        assert adapter.lora_task_id not in self._by_task_id
        self._by_task_id[adapter.lora_task_id] = adapter
        self._arrivals[adapter] = arrival
        self.num_promised_pages += adapter.num_pages

    def end_wait(self, adapter: CachedAdapter) -> Arrival:
        """Take an adapter out of the arrivals."""
        self.num_promised_pages -= adapter.num_pages
        return self._arrivals.pop(adapter)

    def give_pages(self, adapter: CachedAdapter) -> None:
        """Give an arrival the pages it has waited for, which are free, and begin to fill them."""
        arrival = self.end_wait(adapter)
        adapter.pages = self.pool.allocate(adapter.shape)
        arrival.fill()
        self.update(adapter)

    def fill(self, adapter: CachedAdapter, packed: PackedAdapter) -> None:
        """Copy an adapter into its pages."""
        started = time.perf_counter()
        copy_pages(packed.pages, self.views(adapter))
        self.note_filled(adapter, packed.rows, time.perf_counter() - started)

    def note_filled(self, adapter: CachedAdapter, rows: list[PackedRow], seconds: float) -> None:
        """An adapter's pages hold it now."""
        adapter.rows = rows
        adapter.state.move(Memory.FILLED)
        adapter.arrived.set_result(None)
        self._copies += 1
        self._copy_seconds += seconds

    def note_read(self, adapter: CachedAdapter, rows: list[PackedRow], seconds: float) -> None:
        """An adapter's pages hold it now, read from its file."""
        self.note_filled(adapter, rows, seconds)
        self.load_seconds.observe(seconds)

    def hold(self, adapter: CachedAdapter, is_held: bool) -> None:
        """An operator wants a current version in memory, or does not care any more."""
        if adapter.state.is_held is not is_held:
            adapter.state.is_held = is_held
            self.num_held_pages += adapter.num_pages if is_held else -adapter.num_pages
            self.update(adapter)

    def num_other_held_pages(self, adapter: CachedAdapter) -> int:
        """Pages of the adapters that an operator holds, but for one."""
        return self.num_held_pages - (adapter.num_pages if adapter.state.is_held else 0)

    def retire(self, adapter: CachedAdapter) -> None:
        """Take an adapter's task id away; its pages stay until `remove`."""
        self.hold(adapter, False)
        del self._by_task_id[adapter.lora_task_id]
        adapter.state.move(Version.RETIRED)
        self._retired[adapter] = None

    def remove(self, adapter: CachedAdapter) -> None:
        """Free the pages of an adapter that nobody wants, or end its wait for them."""
        state = adapter.state
        assert not state.is_wanted, f"LoRA task {adapter.lora_task_id} is pinned {state.num_pins} times"
        assert not state.is_busy, f"LoRA task {adapter.lora_task_id} is being read or written: {state}"
        if state.is_retired:
            del self._retired[adapter]
        else:
            del self._by_task_id[adapter.lora_task_id]
        if adapter in self._arrivals:
            self.end_wait(adapter).discard()
        self._order.discard(adapter)
        self.pool.free(adapter.pages)
        state.move(Memory.GONE)

    def evict(self, adapter: CachedAdapter) -> None:
        """`remove` for the sake of others."""
        self.remove(adapter)
        self._evictions += 1

    def close(self) -> None:
        """No adapter waits for room any more."""
        for arrival in self._arrivals.values():
            arrival.discard()

    def views(self, adapter: CachedAdapter) -> list[torch.Tensor]:
        """The adapter's pages themselves, uint8 [page_bytes] each."""
        return self.pool.views(adapter.pages)

    def num_bytes(self, adapter: CachedAdapter) -> int:
        """Bytes that an adapter takes here; nothing while it waits for room."""
        return len(adapter.pages) * self.pool.page_bytes

    def count_request(self, lora_task_id: TaskId) -> bool:
        """A request looked here for its adapter; whether it is here."""
        is_here = lora_task_id in self._by_task_id
        self._hits += is_here
        self._misses += not is_here
        return is_here

    @property
    def stats(self) -> TierStats:
        return TierStats(
            bytes_used=(self.pool.count - self.pool.num_free) * self.pool.page_bytes,
            bytes_total=self.pool.count * self.pool.page_bytes,
            num_adapters=len(self),
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            copies=self._copies,
            copy_seconds=self._copy_seconds,
        )

    @property
    def latest(self) -> Iterator[CachedAdapter]:
        """The current version of every task id, most recently used first."""
        return reversed(self._by_task_id.values())

    @property
    def current(self) -> list[CachedAdapter]:
        """The current version of every task id, least recently used first."""
        return list(self._by_task_id.values())

    @property
    def adapters(self) -> Iterable[CachedAdapter]:
        """All versions, the current ones least recently used first."""
        return chain(self._by_task_id.values(), self._retired)

    def check_integrity(self) -> None:
        self.pool.check_integrity((adapter.shape, adapter.pages) for adapter in self.adapters if adapter.pages)
        self._order.check_integrity(self.adapters)
        for adapter in self.adapters:
            adapter.state.check_integrity()
            assert adapter.state.memory is not Memory.GONE
            assert (adapter.state.memory is Memory.WAITING) == (adapter in self._arrivals)
            assert adapter.pages or adapter.state.memory in (Memory.WAITING, Memory.LOST)
            assert adapter.state.is_filled == bool(adapter.rows)
            assert adapter.entries is not None or not adapter.state.is_filled
            assert adapter.state.is_retired == (adapter in self._retired)
        held = (adapter for adapter in self.current if adapter.state.is_held)
        assert self.num_held_pages == sum(adapter.num_pages for adapter in held)
        assert self.num_promised_pages == sum(adapter.num_pages for adapter in self._arrivals)


def copy_pages(sources: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """sources: uint8 [num_pages, page_bytes]. targets: as many, uint8 [page_bytes] each."""
    # Page by page: indexing with a list copies byte by byte, six times slower.
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


_MOVED_BYTES = 32 << 20
"""Of pages that are moved and have memory twice."""


def move_pages(sources: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """As `copy_pages`; the memory of `sources`, which nobody may read any more, goes back to Linux meanwhile."""
    step = max(1, _MOVED_BYTES // sources.shape[1])
    for first in range(0, len(sources), step):
        some = sources[first : first + step]
        copy_pages(some, targets[first : first + step])
        give_back(some)


def _is_only_held(adapter: CachedAdapter, replaced: CachedAdapter | None) -> bool:
    """Whether an adapter is the replaced one, and only an operator wants it."""
    return adapter is replaced and adapter.state.is_held and adapter.state.num_pins == 0
