"""`HostTier`: packed adapters in host memory, by task id, within a fixed number of pages."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

import torch

from multilora_engine.histogram import Histogram
from multilora_engine.lora.layout import PackedAdapter, PackedRow
from multilora_engine.lora.life_cycle import TierStats
from multilora_engine.lora.names import TaskId
from multilora_engine.lora.page_pool import PagePool
from multilora_wire.layout import PageShape


@dataclass(eq=False)
class CachedAdapter:
    """One version of one adapter in the host tier. Compared by identity: two versions of an id are two adapters.

    ranks: the different ranks of its rows, ascending. name: what its source calls it, if anything.
    num_pins: requests that use it, from acceptance to the last token; only `LoRAManager` changes it.
    is_pinned: an operator wants it kept, used or not.
    is_retired: replaced by another version, or unloaded; it goes when its last pin does.
    shape: of the pages it needs; as long as it waits for room, `pages` is empty.
    rows: empty until its pages are filled. load: fills them from the disk tier; its result is the rows, which
        `LoRAManager.poll` takes up. None: nothing is under way.
    is_being_written: the disk tier reads its pages. is_unkeepable: the disk tier could not keep it.
    arrived: done when its pages are filled; raises RequestError if its file could not be read, cancelled if it went
        before.
    kept: done when its file is written; raises OSError if that failed last, cancelled if it is not wanted any more.
    last_used_s: seconds since the epoch of the last pin, at first of the insertion. num_hits: pins so far.
    """

    lora_task_id: TaskId
    digest: str
    ranks: tuple[int, ...]
    shape: PageShape
    name: str = ""
    rows: list[PackedRow] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_pins: int = 0
    is_pinned: bool = False
    is_retired: bool = False
    load: Future[list[PackedRow]] | None = None
    is_being_written: bool = False
    is_unkeepable: bool = False
    arrived: Future[None] = field(default_factory=Future)
    kept: Future[None] = field(default_factory=Future)
    last_used_s: float = field(default_factory=time.time)
    num_hits: int = 0

    @property
    def num_pages(self) -> int:
        return self.shape.num_pages

    @property
    def is_evictable(self) -> bool:
        """Whether it may go now."""
        return self.is_free_to_go and bool(self.rows) and not self.is_being_written

    @property
    def is_free_to_go(self) -> bool:
        """Whether it may go once nothing is read or written any more."""
        return self.num_pins == 0 and not self.is_pinned


class HostTier:
    """Holds every cached adapter, and those that wait for room. Changed only by `LoRAManager`.

    load_seconds: of the adapters that were read from disk.
    """

    def __init__(self, num_pages: int, page_bytes: int, pin_memory: bool = False) -> None:
        self.pool = PagePool(num_pages, page_bytes, torch.device("cpu"), pin_memory)
        self._by_task_id: OrderedDict[TaskId, CachedAdapter] = OrderedDict()
        self._retired: list[CachedAdapter] = []
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
        """Make a current version the most recently used one."""
        self._by_task_id.move_to_end(adapter.lora_task_id)

    def victims_for(self, shape: PageShape, may_go: Callable[[CachedAdapter], bool]) -> list[CachedAdapter] | None:
        """The adapters to evict so that a shape fits, least recently used first; None if all are not enough.

        may_go: asked of every adapter that has pages and that nobody uses.
        """
        return self.pool.victims(
            shape, ((a, a.pages) for a in self.adapters_by_use if a.is_free_to_go and a.pages and may_go(a))
        )

    def can_hold(self, shape: PageShape, replaced: CachedAdapter | None = None) -> bool:
        """Whether a shape fits once all that nobody uses has gone, and reads and writes have ended.

        replaced: this version goes, even if an operator pinned it.
        """
        return self.pool.fits_with(shape, self._pages_of(lambda a: a.is_free_to_go or _goes(a, replaced)))

    def can_ever_hold(self, shape: PageShape) -> bool:
        """Whether a shape fits beside the adapters that an operator keeps, once all requests have ended."""
        return self.pool.fits_with(shape, self._pages_of(lambda a: not a.is_pinned))

    def num_reachable(self, replaced: CachedAdapter | None = None) -> int:
        """Pages that are free in the case that `can_hold` describes."""
        return self.pool.num_free + sum(
            len(adapter.pages) for adapter in self.adapters if adapter.is_free_to_go or _goes(adapter, replaced)
        )

    def num_kept(self, besides: CachedAdapter | None = None) -> int:
        """Pages of the adapters that an operator keeps, but for one."""
        return sum(a.num_pages for a in self._by_task_id.values() if a.is_pinned and a is not besides)

    def add(self, adapter: CachedAdapter) -> None:
        """Make an adapter without pages the current version of its task id."""
        assert adapter.lora_task_id not in self._by_task_id
        self._by_task_id[adapter.lora_task_id] = adapter

    def give_pages(self, adapter: CachedAdapter) -> None:
        """The pages an adapter has waited for, which are free; they are still to be filled."""
        adapter.pages = self.pool.allocate(adapter.shape)

    def fill(self, adapter: CachedAdapter, packed: PackedAdapter) -> None:
        """Copy an adapter into its pages."""
        started = time.perf_counter()
        # Page by page: indexing with a list copies byte by byte, six times slower.
        for source, target in zip(packed.pages, self.views(adapter), strict=True):
            target.copy_(source)
        adapter.rows = packed.rows
        adapter.arrived.set_result(None)
        self.count_copy(time.perf_counter() - started)

    def retire(self, adapter: CachedAdapter) -> None:
        """Take an adapter's task id away; its pages stay until `remove`."""
        del self._by_task_id[adapter.lora_task_id]
        adapter.is_retired = True
        adapter.is_pinned = False
        self._retired.append(adapter)

    def remove(self, adapter: CachedAdapter) -> None:
        """Free the pages of an adapter that nobody pins."""
        assert adapter.num_pins == 0, f"LoRA task {adapter.lora_task_id} is pinned {adapter.num_pins} times"
        assert adapter.load is None, f"LoRA task {adapter.lora_task_id} is being read into its pages"
        assert not adapter.is_being_written, f"LoRA task {adapter.lora_task_id} is being written from its pages"
        if adapter.is_retired:
            self._retired.remove(adapter)
        else:
            del self._by_task_id[adapter.lora_task_id]
        self.pool.free(adapter.pages)

    def evict(self, adapter: CachedAdapter) -> None:
        """`remove` for the sake of others."""
        assert adapter.is_evictable
        self.remove(adapter)
        self._evictions += 1

    def views(self, adapter: CachedAdapter) -> list[torch.Tensor]:
        """The adapter's pages themselves, uint8 [page_bytes] each."""
        return self.pool.views(adapter.pages)

    def count_copy(self, seconds: float) -> None:
        """One more adapter was copied in here."""
        self._copies += 1
        self._copy_seconds += seconds

    def count_load(self, seconds: float) -> None:
        """One more adapter was read from disk in here."""
        self.count_copy(seconds)
        self.load_seconds.observe(seconds)

    def num_bytes(self, adapter: CachedAdapter) -> int:
        """What an adapter takes here; nothing while it waits for room."""
        return len(adapter.pages) * self.pool.page_bytes

    def stats(self, hits: int, misses: int) -> TierStats:
        return TierStats(
            bytes_used=(self.pool.count - self.pool.num_free) * self.pool.page_bytes,
            bytes_total=self.pool.count * self.pool.page_bytes,
            num_adapters=len(self),
            hits=hits,
            misses=misses,
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
    def adapters(self) -> list[CachedAdapter]:
        """All versions, the current ones least recently used first."""
        return list(self.adapters_by_use)

    @property
    def adapters_by_use(self) -> Iterator[CachedAdapter]:
        """All versions one by one; the tier must not change meanwhile."""
        return chain(self._by_task_id.values(), self._retired)

    def _pages_of(self, is_meant: Callable[[CachedAdapter], bool]) -> Iterator[Sequence[int]]:
        return (adapter.pages for adapter in self.adapters_by_use if is_meant(adapter))

    def check_integrity(self) -> None:
        self.pool.check_integrity((adapter.shape, adapter.pages) for adapter in self.adapters if adapter.pages)
        assert all(adapter.num_pins >= 0 for adapter in self.adapters)
        assert all(a.num_pins > 0 or a.load is not None or a.is_being_written for a in self._retired), (
            "a retired adapter outlived its last pin"
        )


def _goes(adapter: CachedAdapter, replaced: CachedAdapter | None) -> bool:
    """Whether this version goes at once when another one replaces it."""
    return adapter is replaced and adapter.num_pins == 0
