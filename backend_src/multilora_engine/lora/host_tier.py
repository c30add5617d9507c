"""`HostTier`: packed adapters in host memory, by task id, within a fixed number of pages."""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

import torch

from multilora_engine.errors import AdapterCacheFull
from multilora_engine.lora.format import PackedAdapter, PackedRow, ranks_of
from multilora_engine.lora.life_cycle import TierStats
from multilora_engine.lora.page_pool import PagePool


@dataclass(eq=False)
class CachedAdapter:
    """One version of one adapter in the host tier. Compared by identity: two versions of an id are two adapters.

    ranks: the different ranks of its rows, ascending. name: what its source calls it, if anything.
    num_pins: requests that use it, from acceptance to the last token; only `LoRAManager` changes it.
    is_pinned: an operator wants it kept, used or not.
    is_retired: replaced by another version, or unloaded; it goes when its last pin does.
    load: fills its pages from the disk tier; its result is the rows, and until `LoRAManager.poll` took that up they are
        empty. None: nothing is under way.
    last_used_s: seconds since the epoch of the last pin, at first of the insertion. num_hits: pins so far.
    """

    lora_task_id: int
    digest: str
    ranks: tuple[int, ...]
    rows: list[PackedRow]
    pages: list[int]
    name: str = ""
    num_pins: int = 0
    is_pinned: bool = False
    is_retired: bool = False
    load: Future[list[PackedRow]] | None = None
    last_used_s: float = field(default_factory=time.time)
    num_hits: int = 0

    @property
    def is_evictable(self) -> bool:
        return self.num_pins == 0 and not self.is_pinned and self.load is None


class HostTier:
    """Holds every cached adapter. Evicts the least recently used that nobody pins, and only as many as needed."""

    def __init__(self, num_pages: int, page_bytes: int, pin_memory: bool = False) -> None:
        self.pool = PagePool(num_pages, page_bytes, torch.device("cpu"), pin_memory)
        self._by_task_id: OrderedDict[int, CachedAdapter] = OrderedDict()
        self._retired: list[CachedAdapter] = []
        self._evictions = 0
        self._copies = 0
        self._copy_seconds = 0.0

    def __len__(self) -> int:
        return len(self._by_task_id)

    def get(self, lora_task_id: int) -> CachedAdapter | None:
        """The current version of an adapter, which becomes the most recently used."""
        adapter = self._by_task_id.get(lora_task_id)
        if adapter is not None:
            self._by_task_id.move_to_end(lora_task_id)
        return adapter

    def victims_for(self, lora_task_id: int, num_pages: int) -> list[CachedAdapter]:
        """The adapters to evict so that `num_pages` are free, least recently used first; none if there is room.

        The version of `lora_task_id` that is to be replaced goes before any other.

        Raises AdapterCacheFull when evicting all that may go would not be enough; then nothing should be evicted.
        """
        victims: list[CachedAdapter] = []
        reachable = self.pool.num_free
        replaced = [adapter] if (adapter := self._by_task_id.get(lora_task_id)) is not None else []
        others = (adapter for adapter in self._by_task_id.values() if adapter.lora_task_id != lora_task_id)
        for adapter in chain(replaced, others):
            if reachable >= num_pages:
                break
            if adapter.is_evictable:
                victims.append(adapter)
                reachable += len(adapter.pages)
        if reachable < num_pages:
            evictable = reachable - self.pool.num_free
            raise AdapterCacheFull(lora_task_id, num_pages, self.pool.num_free, evictable, self.pool.count)
        return victims

    def insert(self, lora_task_id: int, packed: PackedAdapter, name: str = "") -> CachedAdapter:
        """Copy an adapter into free pages (see `victims_for`) and make it the current version of its task id."""
        started = time.perf_counter()
        adapter = self.reserve(lora_task_id, packed.digest, name, ranks_of(packed.rows), len(packed.pages))
        # Page by page: indexing with a list copies byte by byte, six times slower.
        for source, target in zip(packed.pages, self.views(adapter), strict=True):
            target.copy_(source)
        adapter.rows = packed.rows
        self.count_copy(time.perf_counter() - started)
        return adapter

    def reserve(
        self, lora_task_id: int, digest: str, name: str, ranks: tuple[int, ...], num_pages: int
    ) -> CachedAdapter:
        """Make an adapter without rows the current version of its task id; its free pages are still to be filled."""
        adapter = CachedAdapter(lora_task_id, digest, ranks, [], self.pool.allocate(num_pages), name)
        assert lora_task_id not in self._by_task_id
        self._by_task_id[lora_task_id] = adapter
        return adapter

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

    def read(self, adapter: CachedAdapter) -> torch.Tensor:
        """A copy of an adapter's pages, uint8 [num_pages, page_bytes]."""
        return torch.stack(self.views(adapter))

    def views(self, adapter: CachedAdapter) -> list[torch.Tensor]:
        """The adapter's pages themselves, uint8 [page_bytes] each."""
        return [self.pool.storage[page] for page in adapter.pages]

    def count_copy(self, seconds: float) -> None:
        """One more adapter was copied in here."""
        self._copies += 1
        self._copy_seconds += seconds

    def num_bytes(self, adapter: CachedAdapter) -> int:
        """What an adapter takes here."""
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
    def current(self) -> list[CachedAdapter]:
        """The current version of every task id, least recently used first."""
        return list(self._by_task_id.values())

    @property
    def adapters(self) -> list[CachedAdapter]:
        """All versions, the current ones least recently used first."""
        return [*self._by_task_id.values(), *self._retired]

    def check_integrity(self) -> None:
        self.pool.check_integrity(adapter.pages for adapter in self.adapters)
        assert all(adapter.num_pins >= 0 for adapter in self.adapters)
        assert all(a.num_pins > 0 or a.load is not None for a in self._retired), (
            "a retired adapter outlived its last pin"
        )
