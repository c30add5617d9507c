"""`DeviceTier`: the adapters that a step can use: their pages on the device, and their place in the tables."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Literal

import torch

from multilora_engine.errors import AdapterNotLoaded
from multilora_engine.execution.transfer import to_device
from multilora_engine.histogram import Histogram
from multilora_engine.lora.format import TORCH_DTYPES
from multilora_engine.lora.host_tier import CachedAdapter
from multilora_engine.lora.layout import PackedRow
from multilora_engine.lora.life_cycle import AdapterEvent, OnEvent, TierStats, ignore_event
from multilora_engine.lora.names import label_of
from multilora_engine.lora.page_copies import CopyPages, PageCopy, copies_to
from multilora_engine.lora.page_pool import PagePool
from multilora_kernels import LoRATables
from multilora_wire.layout import AdapterLayout, PageShape

_logger = logging.getLogger(__name__)


@dataclass
class _Resident:
    """An adapter whose pages are on the device, or on their way there: then `copy` is not None."""

    pages: list[int]
    copy: PageCopy | None
    lora_index: int | None = None
    num_users: int = 0


class DeviceTier:
    """Pages on the device and the tables that address them; changed only by `LoRAManager`.

    On a CPU the host tier's pages are the device's (`host_pool is device_pool`): nothing is ever copied. Otherwise an
    adapter is copied page by page beside the steps, and `is_ready` tells when a step may use it. A copy that fails
    leaves nothing behind, and is not tried again before `take_failures` has told of it.

    A running sequence is a *user* of its adapter. Adapters without users stay until their pages or their `lora_index`
    are wanted, least recently used first.

    copy_seconds: of each copy. Of shared pages there are none.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        host_pool: PagePool,
        device_pool: PagePool,
        max_loras: int,
        on_event: OnEvent = ignore_event,
        copy_pages: CopyPages | None = None,
    ) -> None:
        """copy_pages: in place of what fits the device."""
        self.layout = layout
        self._on_event = on_event
        self._hits = 0
        self._misses = 0
        self._evictions = 0
        self._copies = 0
        self.copy_seconds = Histogram()
        self._num_failures = 0
        self._failures: dict[CachedAdapter, AdapterNotLoaded] = {}
        self._host_pool = host_pool
        self._pool = device_pool
        self._residents: OrderedDict[CachedAdapter, _Resident] = OrderedDict()
        self._free_indices = list(range(max_loras - 1, -1, -1))
        self._num_in_use = 0
        device = device_pool.storage.device
        self._copy_pages = copy_pages or copies_to(device)
        shape = (max_loras, layout.sites.num_columns)
        self.tables = LoRATables(
            arena=device_pool.storage.view(-1).view(TORCH_DTYPES[layout.lora_dtype]),
            rank=torch.zeros(shape, dtype=torch.int32, device=device),
            a_offset=torch.zeros(shape, dtype=torch.int64, device=device),
            b_offset=torch.zeros(shape, dtype=torch.int64, device=device),
            magnitude_offset=torch.full(shape, -1, dtype=torch.int64, device=device),
            max_rank=layout.max_rank,
        )

    @property
    def is_shared(self) -> bool:
        """Whether host and device pages are the same memory."""
        return self._pool is self._host_pool

    def prefetch(self, adapter: CachedAdapter, wanted: Set[CachedAdapter] = frozenset()) -> bool:
        """Bring an adapter's pages to the device, without waiting. False if that is not possible now.

        wanted: adapters that others wait for; they are not evicted to make room for this one.
        """
        if adapter in self._residents:
            self._residents.move_to_end(adapter)
            return True
        if adapter in self._failures:
            return False
        if self.is_shared:
            self._residents[adapter] = _Resident(adapter.pages, copy=None)
            self._emit("loaded_to_device", adapter)
            return True
        return self._make_room(adapter.shape, wanted) and self._start_copy(adapter)

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def max_loras(self) -> int:
        """Distinct adapters that a step can use."""
        return len(self.tables.rank)

    @property
    def latest(self) -> Iterator[CachedAdapter]:
        """The adapters that a step can use at once, most recently used first."""
        return (adapter for adapter, resident in reversed(self._residents.items()) if resident.copy is None)

    def has(self, adapter: CachedAdapter) -> bool:
        """Whether a step can use the adapter at once, as far as is known without a look at its copy."""
        resident = self._residents.get(adapter)
        return resident is not None and resident.copy is None

    def __contains__(self, adapter: CachedAdapter) -> bool:
        """Whether the adapter is here or on its way."""
        return adapter in self._residents

    def is_ready(self, adapter: CachedAdapter) -> bool:
        """Whether a step that starts now finds the adapter's weights on the device."""
        resident = self._residents.get(adapter)
        if resident is None:
            return False
        if resident.copy is not None:
            try:
                if resident.copy.is_done():
                    self._end_copy(adapter, resident, resident.copy)
            except RuntimeError as error:
                del self._residents[adapter]
                self._free(resident)
                self._note_failure(adapter, error)
                return False
        return resident.copy is None

    def take_failures(self) -> dict[CachedAdapter, AdapterNotLoaded]:
        """The adapters whose copies have failed since; whoever waits for one has to hear of it."""
        failures, self._failures = self._failures, {}
        return failures

    @property
    def has_failures(self) -> bool:
        """Whether `take_failures` has something to tell."""
        return bool(self._failures)

    def forget_failure(self, adapter: CachedAdapter) -> None:
        """Nobody waits for it any more."""
        self._failures.pop(adapter, None)

    def acquire(self, adapter: CachedAdapter) -> bool:
        """Give a ready adapter a `lora_index` and one more user. False if `max_loras` others have users."""
        resident = self._residents[adapter]
        if resident.lora_index is None:
            index = self._claim_index()
            if index is None:
                return False
            resident.lora_index = index
            self._write_tables(index, adapter.rows, resident.pages)
        self._num_in_use += resident.num_users == 0
        resident.num_users += 1
        self._residents.move_to_end(adapter)
        return True

    def release(self, adapter: CachedAdapter) -> None:
        """One user less."""
        resident = self._residents[adapter]
        assert resident.num_users > 0
        resident.num_users -= 1
        self._num_in_use -= resident.num_users == 0

    def lora_index(self, adapter: CachedAdapter) -> int:
        """The row of an acquired adapter in the tables."""
        resident = self._residents[adapter]
        assert resident.num_users > 0
        assert resident.lora_index is not None
        return resident.lora_index

    def drop(self, adapter: CachedAdapter) -> None:
        """Forget an adapter without users, if it is here."""
        resident = self._residents.pop(adapter, None)
        if resident is None:
            return
        assert resident.num_users == 0, f"LoRA task {adapter.lora_task_id} is in use on the device"
        if resident.copy is not None:
            # The host's pages, which it reads, may be written to from now on.
            try:
                self._end_copy(adapter, resident, resident.copy)
            except RuntimeError as error:
                self._log_failure(adapter, error)
        self._free(resident)
        self._emit("unloaded_from_device", adapter)

    @property
    def stats(self) -> TierStats:
        """Of shared pages only those of adapters that steps have used count as the device's."""
        return TierStats(
            bytes_used=sum(len(resident.pages) for resident in self._residents.values()) * self._pool.page_bytes,
            bytes_total=self._pool.count * self._pool.page_bytes,
            num_adapters=len(self._residents),
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            copies=self._copies,
            copy_seconds=self.copy_seconds.total,
            failures=self._num_failures,
        )

    def count_request(self, adapter: CachedAdapter) -> None:
        """A request was accepted for this adapter: a hit if it is here."""
        if adapter in self._residents:
            self._hits += 1
        else:
            self._misses += 1

    def check_integrity(self) -> None:
        if not self.is_shared:
            self._pool.check_integrity((adapter.shape, r.pages) for adapter, r in self._residents.items())
        used = [r.lora_index for r in self._residents.values() if r.lora_index is not None]
        assert sorted(used + self._free_indices) == list(range(len(self.tables.rank))), "a lora_index is lost or shared"
        assert all(r.num_users == 0 or r.lora_index is not None for r in self._residents.values())
        assert self._num_in_use == sum(r.num_users > 0 for r in self._residents.values())

    def _make_room(self, shape: PageShape, wanted: Set[CachedAdapter]) -> bool:
        # Not those whose copies are under way: dropping one would wait for it.
        unused = [a for a, resident in self._residents.items() if resident.num_users == 0 and a not in wanted]
        idle = ((a, self._residents[a].pages) for a in unused if self.is_ready(a))
        victims = self._pool.victims(shape, idle)
        for adapter in victims or ():
            self.drop(adapter)
            self._evictions += 1
        return victims is not None

    def _claim_index(self) -> int | None:
        if self._free_indices:
            return self._free_indices.pop()
        if self._num_in_use == len(self.tables.rank):
            # Asked for again and again while many adapters wait: it must not cost a look at every resident.
            return None
        for resident in self._residents.values():
            if resident.num_users == 0 and resident.lora_index is not None:
                index, resident.lora_index = resident.lora_index, None
                return index
        return None

    def _start_copy(self, adapter: CachedAdapter) -> bool:
        """Whether a copy to pages that are free is under way, or over."""
        pages = self._pool.allocate(adapter.shape)
        resident = _Resident(pages, copy=None)
        try:
            resident.copy = self._copy_pages(self._host_pool.views(adapter.pages), self._pool.views(pages))
        except RuntimeError as error:
            self._free(resident)
            self._note_failure(adapter, error)
            return False
        self._copies += 1
        self._residents[adapter] = resident
        self.is_ready(adapter)
        return adapter in self._residents

    def _end_copy(self, adapter: CachedAdapter, resident: _Resident, copy: PageCopy) -> None:
        """Raises RuntimeError if it failed."""
        self.copy_seconds.observe(copy.wait())
        resident.copy = None
        self._emit("loaded_to_device", adapter)

    def _free(self, resident: _Resident) -> None:
        """Give back what an adapter had that is not resident any more."""
        if resident.lora_index is not None:
            self._free_indices.append(resident.lora_index)
        if not self.is_shared:
            self._pool.free(resident.pages)

    def _note_failure(self, adapter: CachedAdapter, error: RuntimeError) -> None:
        self._log_failure(adapter, error)
        self._failures[adapter] = AdapterNotLoaded(adapter.lora_task_id, f"copying it to the device failed: {error}")

    def _log_failure(self, adapter: CachedAdapter, error: RuntimeError) -> None:
        self._num_failures += 1
        _logger.error("LoRA task %s: copying it to the device failed: %s", label_of(adapter.lora_task_id), error)

    def _emit(self, kind: Literal["loaded_to_device", "unloaded_from_device"], adapter: CachedAdapter) -> None:
        self._on_event(AdapterEvent.of(kind, adapter.lora_task_id, adapter.digest))

    def _write_tables(self, index: int, rows: list[PackedRow], pages: list[int]) -> None:
        entries = _table_entries(rows, pages, self.layout)
        columns, ranks, a_offsets, b_offsets, magnitude_offsets = to_device(entries, self.tables.rank.device)
        self.tables.rank[index] = 0
        self.tables.rank[index, columns] = ranks.int()
        self.tables.a_offset[index, columns] = a_offsets
        self.tables.b_offset[index, columns] = b_offsets
        self.tables.magnitude_offset[index, columns] = magnitude_offsets


def _table_entries(rows: list[PackedRow], pages: list[int], layout: AdapterLayout) -> torch.Tensor:
    """int64 [5, num_sites]: column, rank, and the offsets of A, B and magnitude as elements of the whole arena."""
    entries = []
    for row in rows:
        a_offset = _arena_offset(row.a_offset, pages, layout)
        b_offset = _arena_offset(row.b_offset, pages, layout)
        magnitude_offset = _arena_offset(row.magnitude_offset, pages, layout) if row.is_dora else -1
        for part in layout.sites.module_at[row.layer, row.module_id].parts:
            magnitude = magnitude_offset + part.start if row.is_dora else -1
            entries.append((part.column, row.rank, a_offset, b_offset + part.start * row.rank, magnitude))
    return torch.tensor(entries, dtype=torch.int64).T.contiguous()


def _arena_offset(offset: int, pages: list[int], layout: AdapterLayout) -> int:
    """From bytes in the adapter's own pages to elements in the whole arena.

    The pages of a piece that spans them are consecutive in the arena, too.
    """
    page, place = divmod(offset, layout.page_bytes)
    return (pages[page] * layout.page_bytes + place) // layout.itemsize
