"""`DeviceTier`: the adapters that a step can use: their pages on the device, and their place in the tables."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from multilora_engine.batch.forward_batch import OuterParts
from multilora_engine.batch.transfer import to_device
from multilora_engine.errors import AdapterNotLoaded
from multilora_engine.histogram import Histogram
from multilora_engine.lora.adapter_state import CachedAdapter, Device
from multilora_engine.lora.format import ARENA_DTYPES
from multilora_engine.lora.free_pages import PagePool
from multilora_engine.lora.layout import PackedAdapter, TableEntries, page_shape
from multilora_engine.lora.life_cycle import OnEvent, TierStats, adapter_event, ignore_event
from multilora_engine.lora.names import label_of
from multilora_engine.lora.outer_tables import OuterTables
from multilora_engine.lora.page_copies import CopyPages, PageCopy, copies_to
from multilora_kernels import LoRATables, has_own_order, order_codes
from multilora_wire.layout import AdapterLayout, PageShape


class TableRows:
    """`count` rows, each free or of one adapter; a row's number is the `lora_index`."""

    def __init__(self, layout: AdapterLayout, storage: torch.Tensor, count: int) -> None:
        """storage: the device's pages, uint8 [num_pages, page_bytes]."""
        self._layout = layout
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        shape, device = (count, layout.sites.num_columns), storage.device
        self.tables = LoRATables(
            arena=storage.view(-1).view(ARENA_DTYPES[layout.lora_dtype]),
            rank=torch.zeros(shape, dtype=torch.int32, device=device),
            a_offset=torch.zeros(shape, dtype=torch.int64, device=device),
            b_offset=torch.zeros(shape, dtype=torch.int64, device=device),
            magnitude_offset=torch.full(shape, -1, dtype=torch.int64, device=device),
            max_rank=layout.max_rank,
        )
        self._outer = OuterTables(layout, storage, count)
        sizes = {site.column + n: site.out_size for site in layout.sites.all_sites for n in range(site.experts)}
        self._out_sizes = torch.tensor([sizes.get(column, 0) for column in range(shape[1])], device=device)

    def claim(self) -> int | None:
        """A free row, if there is one."""
        return self._free.pop() if self._free else None

    def free(self, lora_index: int) -> None:
        self._free.append(lora_index)
        self._outer.forget(lora_index)

    def write(self, index: int, entries: TableEntries, pages: list[int], has_order: bool = True) -> None:
        """Let a row address an adapter's matrices, which lie in `pages`.

        has_order: whether codes there have the order of the device's kernels; else they are brought to it.
        """
        self._outer.write(index, entries.outer, pages)
        table = np.stack([entries.columns, entries.ranks, *entries.located(pages, self._layout)])
        sent = to_device(torch.from_numpy(table), self.tables.rank.device)
        columns, ranks, a_offsets, b_offsets, magnitude_offsets = sent
        self.tables.rank[index] = 0
        self.tables.rank[index, columns] = ranks.int()
        self.tables.a_offset[index, columns] = a_offsets
        self.tables.b_offset[index, columns] = b_offsets
        self.tables.magnitude_offset[index, columns] = magnitude_offsets
        if not has_order:
            sizes = self._out_sizes[columns]
            order_codes(self.tables.arena, ranks, b_offsets, sizes, self.tables.max_rank)

    def clear(self, lora_index: int) -> None:
        """Free a row, which is again as at first."""
        for table in (self.tables.rank, self.tables.a_offset, self.tables.b_offset):
            table[lora_index] = 0
        self.tables.magnitude_offset[lora_index] = -1
        self.free(lora_index)

    def outer_parts(self, lora_indices: Iterable[int]) -> OuterParts | None:
        """The parts outside the layers of the adapters in these rows; None where there are none."""
        return self._outer.parts_of(lora_indices)

    def check_integrity(self, used: Iterable[int]) -> None:
        assert sorted([*used, *self._free]) == list(range(self.count)), "a lora_index is lost or shared"


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Pages that follow each other in both tiers, together: each copy takes the engine's thread microseconds."""
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    for start, stop in pairwise([0, *breaks.tolist(), len(sources)]):
        source, target = sources[start], targets[start]
        yield slice(source, source + stop - start), slice(target, target + stop - start)


class IdleAdapters:
    """Adapters with their pages, least recently used first. Adapters with a `lora_index` have an order of their own,
    too.

    A change costs the same however many adapters there are.

    num_pages: of all of them.
    """

    def __init__(self) -> None:
        self._num_pages_of: OrderedDict[CachedAdapter, int] = OrderedDict()
        self._with_index: OrderedDict[CachedAdapter, None] = OrderedDict()
        self.num_pages = 0

    def __iter__(self) -> Iterator[CachedAdapter]:
        return iter(self._num_pages_of)

    def add(self, adapter: CachedAdapter, num_pages: int, has_index: bool) -> None:
        """Nobody uses an adapter any more: it is the most recently used one."""
        self._num_pages_of[adapter] = num_pages
        self.num_pages += num_pages
        if has_index:
            self._with_index[adapter] = None

    def discard(self, adapter: CachedAdapter) -> None:
        """Forget an adapter, if it is here."""
        self.num_pages -= self._num_pages_of.pop(adapter, 0)
        self._with_index.pop(adapter, None)

    def touch(self, adapter: CachedAdapter) -> None:
        """Make an adapter the most recently used one, if it is here."""
        if adapter in self._num_pages_of:
            self._num_pages_of.move_to_end(adapter)
        if adapter in self._with_index:
            self._with_index.move_to_end(adapter)

    def take_index(self) -> CachedAdapter | None:
        """The least recently used adapter that has a `lora_index`, which it loses."""
        return self._with_index.popitem(last=False)[0] if self._with_index else None

    def check_integrity(self, idle: Mapping[CachedAdapter, int], with_index: Set[CachedAdapter]) -> None:
        """idle: the pages of each adapter that should be here. with_index: those of them that have a `lora_index`."""
        assert dict(self._num_pages_of) == idle
        assert self._with_index.keys() == with_index
        assert self.num_pages == sum(idle.values())


_COPYING = "copying it to the device"

_logger = logging.getLogger(__name__)


@dataclass
class _Resident:
    """The place of an adapter on the device.

    copy: the copy that fills the pages, while the adapter's state is COPYING. num_users: running sequences. has_order:
    whether codes have the order of the device's kernels.
    """

    pages: list[int]
    copy: PageCopy | None
    lora_index: int | None = None
    num_users: int = 0
    has_order: bool = False


class DeviceTier:
    """Pages on the device and the tables that address them. Writes the device's states of adapters.

    On a CPU the host tier's pages are the device's (`host_pool is device_pool`): nothing is ever copied. Otherwise an
    adapter is copied page by page beside the steps, and `is_ready` tells when a step may use it. A copy that fails, or
    a write of its row, leaves nothing behind, and is not tried again before `take_failures` has told of it. But if the
    device is dead, its error is raised from any operation: no adapter is at fault.

    A running sequence is a *user* of its adapter. Adapters without users are *idle*: they stay until their pages or
    their `lora_index` are wanted, least recently used first. No operation but `stats` looks at all adapters.

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
        is_device_dead: Callable[[], bool] = lambda: False,
    ) -> None:
        """copy_pages: in place of the copies that fit the device. is_device_dead: asked after a failure."""
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
        self._copying: dict[CachedAdapter, None] = {}
        self._idle = IdleAdapters()
        self._rows = TableRows(layout, device_pool.storage, max_loras)
        # Pages of the host are in the order of the wire.
        self._has_own_order = not self.is_shared and has_own_order(self.tables.arena)
        self._copy_pages = copy_pages or copies_to(device_pool.storage.device)
        self._is_device_dead = is_device_dead

    @property
    def tables(self) -> LoRATables:
        return self._rows.tables

    def outer_parts(self, lora_indices: Iterable[int]) -> OuterParts | None:
        """The parts outside the layers of the adapters in these rows of `tables`; None where there are none."""
        return self._rows.outer_parts(lora_indices)

    def fits(self, shape: PageShape) -> bool:
        """Whether there are free pages for a shape."""
        return self._pool.fits(shape)

    @contextmanager
    def scratch_adapter(self, adapter: PackedAdapter) -> Iterator[int]:
        """The row in `tables` of an adapter that nobody has sent, in pages that fit, until the context ends.

        At start only: no row is taken. Raises the error of its copy, or of the write of its row.
        """
        lora_index = self._rows.claim()
        assert lora_index is not None, "every row is taken"
        with ExitStack() as stack:
            stack.callback(self._rows.clear, lora_index)
            assert adapter.entries is not None
            pages = self._pool.allocate(page_shape(adapter.rows, adapter.num_pages, self.layout))
            stack.callback(self._pool.free, pages)
            self._copy(adapter.pages, range(adapter.num_pages), pages).wait()
            self._rows.write(lora_index, adapter.entries, pages, not self._has_own_order)
            yield lora_index

    @property
    def is_shared(self) -> bool:
        """Whether host and device pages are the same memory."""
        return self._pool is self._host_pool

    def prefetch(self, adapter: CachedAdapter, wanted: Set[CachedAdapter] = frozenset()) -> bool:
        """Bring an adapter's pages to the device, without waiting. False if that is not possible now.

        wanted: adapters that other requests wait for; they are not evicted to make room for this one.
        """
        if adapter in self._residents:
            self._residents.move_to_end(adapter)
            self._idle.touch(adapter)
            return True
        if adapter.state.device is Device.FAILED:
            return False
        if self.is_shared:
            self._residents[adapter] = _Resident(adapter.pages, copy=None)
            self._note_ready(adapter)
            return True
        return self._make_room(adapter.shape, wanted) and self._start_copy(adapter)

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def max_loras(self) -> int:
        """Distinct adapters that a step can use."""
        return self._rows.count

    @property
    def latest(self) -> Iterator[CachedAdapter]:
        """The adapters that a step can use at once, most recently used first."""
        return (adapter for adapter in reversed(self._residents) if adapter not in self._copying)

    def is_ready(self, adapter: CachedAdapter) -> bool:
        """Whether a step that starts now finds the adapter's weights on the device."""
        self.poll()
        return adapter.state.device in (Device.READY, Device.IN_USE)

    def poll(self) -> None:
        """Take up the copies that have ended: the first ones, since copies end in the order in which they began."""
        while self._copying and self._has_ended(next(iter(self._copying))):
            pass

    @property
    def is_copying(self) -> bool:
        """Whether `poll` will have something to take up."""
        return bool(self._copying)

    def take_failures(self) -> dict[CachedAdapter, AdapterNotLoaded]:
        """The adapters whose copies have failed since; the requests that wait for them have to hear of it."""
        failures, self._failures = self._failures, {}
        for adapter in failures:
            adapter.state.move(Device.ABSENT)
        return failures

    @property
    def has_failures(self) -> bool:
        """Whether `take_failures` has something to tell."""
        return bool(self._failures)

    def forget_failure(self, adapter: CachedAdapter) -> None:
        """No request waits for the adapter any more."""
        if self._failures.pop(adapter, None) is not None:
            adapter.state.move(Device.ABSENT)

    def acquire(self, adapter: CachedAdapter) -> bool:
        """Give a ready adapter a `lora_index` and one more user.

        False if `max_loras` others have users, or the write of its row has failed.
        """
        resident = self._residents[adapter]
        if resident.lora_index is None:
            index = self._claim_index()
            if index is None:
                return False
            assert adapter.entries is not None, "it is not in memory"
            has_order = resident.has_order or not self._has_own_order
            try:
                self._rows.write(index, adapter.entries, resident.pages, has_order)
            except Exception as error:
                self._rows.free(index)
                # The pages go, too: nobody knows which order their codes have by now.
                self.drop(adapter)
                if not isinstance(error, RuntimeError | MemoryError):
                    raise
                self._note_failure(adapter, error, "writing its row of the tables")
                return False
            resident.lora_index = index
            resident.has_order = True
        if resident.num_users == 0:
            self._idle.discard(adapter)
            adapter.state.move(Device.IN_USE)
        resident.num_users += 1
        self._residents.move_to_end(adapter)
        return True

    def release(self, adapter: CachedAdapter) -> None:
        """One user less."""
        resident = self._residents[adapter]
        assert resident.num_users > 0
        resident.num_users -= 1
        if resident.num_users == 0:
            adapter.state.move(Device.READY)
            self._idle.add(adapter, len(resident.pages), has_index=True)

    def lora_index(self, adapter: CachedAdapter) -> int:
        """The row of an acquired adapter in the tables."""
        resident = self._residents[adapter]
        assert resident.num_users > 0
        assert resident.lora_index is not None
        return resident.lora_index

    def drop(self, adapter: CachedAdapter) -> None:
        """Forget an adapter without users, if it is here."""
        self.forget_failure(adapter)
        if adapter not in self._residents:
            return
        resident = self._residents[adapter]
        assert resident.num_users == 0, f"LoRA task {adapter.lora_task_id} is in use on the device"
        if resident.copy is not None:
            # The host's pages, which it reads, may be written to from now on.
            self._wait_for_copy(adapter, resident.copy)
        self._idle.discard(adapter)
        adapter.state.move(Device.ABSENT)
        self._free(adapter)
        self._emit("unloaded_from_device", adapter)

    @property
    def stats(self) -> TierStats:
        """Where the device shares the host's pages, only adapters that steps have used count as the device's."""
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
        residents = self._residents
        if not self.is_shared:
            self._pool.check_integrity((adapter.shape, r.pages) for adapter, r in residents.items())
        self._rows.check_integrity(r.lora_index for r in residents.values() if r.lora_index is not None)
        for adapter, resident in residents.items():
            device = adapter.state.device
            assert (device is Device.COPYING) == (resident.copy is not None) == (adapter in self._copying)
            assert (device is Device.IN_USE) == (resident.num_users > 0)
            assert (device is Device.READY) == (adapter in self._idle)
            assert resident.num_users == 0 or resident.lora_index is not None
        assert self._copying.keys() <= residents.keys()
        idle = {a: r for a, r in residents.items() if a.state.device is Device.READY}
        with_index = {adapter for adapter, resident in idle.items() if resident.lora_index is not None}
        self._idle.check_integrity({adapter: len(resident.pages) for adapter, resident in idle.items()}, with_index)
        assert not self._failures.keys() & residents.keys()
        assert all(adapter.state.device is Device.FAILED for adapter in self._failures)

    def _make_room(self, shape: PageShape, wanted: Set[CachedAdapter]) -> bool:
        """Evict idle adapters, but none of `wanted`, until a shape fits. Evict none if all of them are not enough."""
        if self._pool.fits(shape):
            return True
        self.poll()
        if self._pool.num_free + self._idle.num_pages < shape.num_pages:
            return False
        idle = ((a, self._residents[a].pages) for a in self._idle if a not in wanted)
        victims = self._pool.victims(shape, idle)
        for adapter in victims or ():
            self.drop(adapter)
            self._evictions += 1
        return victims is not None

    def _claim_index(self) -> int | None:
        index = self._rows.claim()
        if index is None and (adapter := self._idle.take_index()) is not None:
            resident = self._residents[adapter]
            index, resident.lora_index = resident.lora_index, None
        return index

    def _start_copy(self, adapter: CachedAdapter) -> bool:
        """Whether a copy to pages that are free is under way, or over."""
        pages = self._pool.allocate(adapter.shape)
        try:
            copy = self._copy(self._host_pool.storage, adapter.pages, pages)
        except RuntimeError as error:
            self._pool.free(pages)
            self._note_failure(adapter, error)
            return False
        self._copies += 1
        self._residents[adapter] = _Resident(pages, copy)
        self._copying[adapter] = None
        adapter.state.move(Device.COPYING)
        self.poll()
        return adapter in self._residents

    def _copy(self, storage: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> PageCopy:
        """Start to copy pages `sources` of the host's storage to pages `targets` of the device."""
        runs = list(_runs(sources, targets))
        return self._copy_pages(
            [storage[source] for source, _ in runs], [self._pool.storage[target] for _, target in runs]
        )

    def _has_ended(self, adapter: CachedAdapter) -> bool:
        """Whether a copy was under way and is not any more: the adapter is ready, or it is not here."""
        copy = self._residents[adapter].copy
        assert copy is not None
        try:
            if not copy.is_done():
                return False
            self._end_copy(adapter, copy)
        except RuntimeError as error:
            self._free(adapter)
            self._note_failure(adapter, error)
        return True

    def _wait_for_copy(self, adapter: CachedAdapter, copy: PageCopy) -> None:
        try:
            self._end_copy(adapter, copy)
        except RuntimeError as error:
            self._log_failure(adapter, error)

    def _end_copy(self, adapter: CachedAdapter, copy: PageCopy) -> None:
        """Raises RuntimeError if it failed."""
        self.copy_seconds.observe(copy.wait())
        del self._copying[adapter]
        self._residents[adapter].copy = None
        self._note_ready(adapter)

    def _note_ready(self, adapter: CachedAdapter) -> None:
        adapter.state.move(Device.READY)
        self._idle.add(adapter, len(self._residents[adapter].pages), has_index=False)
        self._emit("loaded_to_device", adapter)

    def _free(self, adapter: CachedAdapter) -> None:
        """Take an adapter's place away."""
        resident = self._residents.pop(adapter)
        self._copying.pop(adapter, None)
        if resident.lora_index is not None:
            self._rows.free(resident.lora_index)
        if not self.is_shared:
            self._pool.free(resident.pages)

    def _note_failure(self, adapter: CachedAdapter, error: Exception, work: str = _COPYING) -> None:
        self._log_failure(adapter, error, work)
        adapter.state.move(Device.FAILED)
        self._failures[adapter] = AdapterNotLoaded(adapter.lora_task_id, f"{work} failed: {error}")

    def _log_failure(self, adapter: CachedAdapter, error: Exception, work: str = _COPYING) -> None:
        """Raises `error` of a dead device."""
        if self._is_device_dead():
            raise error
        self._num_failures += 1
        _logger.error("LoRA task %s: %s failed: %s", label_of(adapter.lora_task_id), work, error)

    def _emit(self, kind: Literal["loaded_to_device", "unloaded_from_device"], adapter: CachedAdapter) -> None:
        self._on_event(adapter_event(kind, adapter.lora_task_id, adapter.digest))
