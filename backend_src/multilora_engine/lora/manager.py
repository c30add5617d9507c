"""`LoRAManager`: decides which adapters come into host memory, which stay, and which leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from typing import Literal

import torch

from multilora_engine.errors import (
    AdapterCacheFull,
    AdapterConflict,
    AdapterNotFound,
    AdapterNotLoaded,
    RequestError,
)
from multilora_engine.lora.adapter_file import DiskAdapter
from multilora_engine.lora.adapter_state import AdapterState, CachedAdapter, FreedBy, Memory
from multilora_engine.lora.aliases import Aliases
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.disk_traffic import DiskTraffic
from multilora_engine.lora.format import check_size, kinds_of, ranks_of
from multilora_engine.lora.host_tier import Arrival, HostTier, Loan, PlannedAdapter, copy_pages, move_pages
from multilora_engine.lora.inventory import Inventory
from multilora_engine.lora.layout import AdapterTraits, PackedAdapter, PackedRow, TableEntries, page_shape
from multilora_engine.lora.life_cycle import LoRAStats, OnEvent, adapter_event, ignore_event
from multilora_engine.lora.memory_tiers import MemoryTiers
from multilora_engine.lora.names import TaskId
from multilora_wire.adapter_event import EventKind
from multilora_wire.layout import PageShape

LARGEST_COPY_BYTES = 64 << 20
"""Of an adapter that the engine's thread copies into its pages itself: some 20 ms."""

_MAX_ARRIVALS = 256
"""Adapters on disk that may wait for room: each has a file open."""

OnConflict = Literal["refuse", "replace"]
"""`lora_on_conflict`: whether other weights under a task id that is taken are an error, or a new version."""

Origin = Literal["uploaded", "downloaded", "combined"]
"""How an adapter came: a client sent it, a source had it, or it is a set of other adapters."""


class LoRAManager:
    """Owns every adapter of the engine. Belongs to the engine's thread.

    The adapter of a request: `put` when its weights come along, `pin` when the request is accepted, `memory.acquire`
    when the request may start to run, `memory.release` when it stops (finished or preempted), `memory.unpin` when it
    is finished. A pinned adapter is never evicted and never overwritten; an acquired one stays on the device. `hold`
    keeps an adapter in memory for an operator. `AdapterState` names the states of an adapter.

    Every version of an adapter comes in here, uploaded, fetched or read from its file, and gets its pages in the order
    of arrival. Room is made by evicting adapters without users, least recently used first, and only as many as needed.

    With a disk tier every adapter is written to its file beside the steps, so that it can be evicted at once when its
    pages are wanted; `pin` reads it back. Adapters with files are evicted first. Nothing waits for the disk: pages stay
    taken until they are written, and an adapter that finds no free pages waits for its own. It can be pinned from the
    start, and acquired after `poll` has found it in memory. A file and an adapter in host memory with the same task id
    are always the same version.

    host, device: the tiers in memory. memory: the users of adapters in both. inventory: describes all adapters.
    aliases: names that stand for adapters; no adapter has one of them.
    """

    def __init__(
        self,
        host: HostTier,
        device: DeviceTier,
        on_conflict: OnConflict,
        on_event: OnEvent = ignore_event,
        disk: DiskTier | None = None,
        check_traits: Callable[[AdapterTraits], None] = lambda traits: None,
    ) -> None:
        """check_traits: raises InvalidRequest for an adapter that the model cannot have."""
        self.host = host
        self.device = device
        self.memory = MemoryTiers(host, device)
        self._traffic = DiskTraffic(host, device.layout, disk, self.memory.update, on_event)
        self.inventory = Inventory(host, device, self._traffic)
        self.aliases = Aliases(disk)
        self._check_traits = check_traits
        self._on_conflict = on_conflict
        self._on_event = on_event
        self._given_up: dict[CachedAdapter, RequestError] = {}
        self._num_insertions = 0
        self._num_replacements = 0

    @property
    def stats(self) -> LoRAStats:
        return LoRAStats(
            device=self.device.stats,
            host=self.host.stats,
            disk=self._traffic.stats,
            insertions=self._num_insertions,
            replacements=self._num_replacements,
            waits=self.memory.num_waits,
            wait_seconds=self.memory.wait_seconds,
        )

    def put(
        self,
        lora_task_id: TaskId,
        packed: PackedAdapter | PlannedAdapter,
        name: str = "",
        origin: Origin = "uploaded",
        replaces_set: bool = False,
    ) -> CachedAdapter:
        """Cache an adapter under a task id. The same content again only makes it the most recently used one.

        name: replaces the name it has, unless empty. replaces_set: a set under the task id gives way, whatever
        `lora_on_conflict` says. `packed` must not change: an adapter that waits for room is copied later. A large one
        that a source had is moved: nobody may read `packed` any more. Raises
        InvalidRequest (the model cannot have it), AdapterConflict (other content, and `lora_on_conflict` is `refuse`),
        AliasConflict or AdapterCacheFull; the cache is then unchanged.
        """
        self._check_traits(packed.traits)
        self.aliases.check_adapter(lora_task_id, name)
        cached = self.host.get(lora_task_id)
        known = cached or self._traffic.find(lora_task_id)
        is_conflict = known is not None and known.digest != packed.digest and self._on_conflict == "refuse"
        if known is not None and is_conflict and not (replaces_set and known.traits.members):
            raise AdapterConflict(lora_task_id, known.digest, packed.digest)
        if cached is not None and cached.digest == packed.digest:
            self.host.touch(cached)
            self._rename(cached, name or cached.name)
            if isinstance(packed, PlannedAdapter):
                packed.end()
            return cached
        if isinstance(packed, PackedAdapter) and packed.pages.nbytes > LARGEST_COPY_BYTES:
            packed = self._copied_beside(packed, move_pages if origin == "downloaded" else copy_pages)
        adapter = self._insert(lora_task_id, packed, name) if cached is None else self._replace(cached, packed, name)
        self._emit(origin, adapter)
        return adapter

    def has_room(self, packed: PackedAdapter) -> bool:
        """Whether an adapter can be put without the loss of another one."""
        return self._traffic.has_disk or self.host.pool.fits(self._shape_of(packed))

    def lend(self, lora_task_id: TaskId) -> Loan:
        """The content of the current version of an adapter. An adapter on disk is read, and takes no pages for that.

        Raises AdapterNotFound, or AdapterNotLoaded for an adapter that still waits for its room.
        """
        adapter, file = self.host.get(lora_task_id), self._traffic.find(lora_task_id)
        if adapter is not None and adapter.state.is_filled:
            self.host.touch(adapter)
            return self._lend_pages(adapter)
        if file is not None:
            return self._lend_file(file)
        if adapter is None:
            raise AdapterNotFound(lora_task_id)
        raise AdapterNotLoaded(lora_task_id, "it waits for room in host memory")

    def _lend_pages(self, adapter: CachedAdapter) -> Loan:
        self.memory.lend(adapter)
        rows: Future[list[PackedRow]] = Future()
        rows.set_result(adapter.rows)
        return Loan(
            adapter.lora_task_id,
            adapter.digest,
            adapter.name,
            adapter.kinds,
            rows,
            self.host.views(adapter),
            partial(self.memory.end_loan, adapter),
        )

    def _lend_file(self, file: DiskAdapter) -> Loan:
        opened = self._traffic.open(file)
        pages = list(torch.empty((file.num_pages, self.device.layout.page_bytes), dtype=torch.uint8))
        return Loan(
            file.lora_task_id,
            file.digest,
            file.name,
            file.kinds,
            opened.read(pages),
            pages,
            lambda: None,
        )

    def save(self, lora_task_id: TaskId) -> Future[None] | None:
        """Have an adapter in host memory written to the disk tier, where it survives the death of the engine.

        The future is done when the file is written. It raises OSError if writing failed (every call tries again), and
        is cancelled if the adapter is replaced or unloaded before. None without a disk tier. Raises AdapterNotFound.
        """
        adapter = self.host.get(lora_task_id)
        if adapter is None:
            raise AdapterNotFound(lora_task_id)
        if not self._traffic.has_disk:
            return None
        self._traffic.poll_writes()
        if adapter.state.is_filled:
            self._traffic.save(adapter)
        return adapter.saved

    def pin(self, lora_task_id: TaskId) -> CachedAdapter:
        """Keep the current version of an adapter in host memory for a request, or have its file read first.

        Raises AdapterNotFound, or AdapterCacheFull if it is on disk and there can be no room to read it.
        """
        if not self.host.count_request(lora_task_id):
            self._traffic.count_request(lora_task_id)
        adapter = self._find(lora_task_id)
        self.memory.pin(adapter)
        return adapter

    def load(self, lora_task_id: TaskId) -> Future[None]:
        """Have an adapter that is on disk read into host memory. Raises AdapterNotFound, or AdapterCacheFull without
        room.

        The future is done when the adapter is there. It raises RequestError if the file cannot be read, and is
        cancelled if the adapter is replaced or unloaded before.
        """
        return self._find(lora_task_id).arrived

    def hold(self, lora_task_id: TaskId) -> Future[None]:
        """Evict neither this adapter nor a version that replaces it, until `end_hold`. One on disk is read.

        The future is that of `load`. Raises AdapterNotFound, or AdapterCacheFull if there is no room to read it, or if
        too little room would be left for another one that waits.
        """
        adapter = self._find(lora_task_id)
        if not adapter.state.is_held:
            self._check_hold(adapter)
            self.host.hold(adapter, True)
        return adapter.arrived

    def end_hold(self, lora_task_id: TaskId) -> None:
        """Let an adapter be evicted again. Raises AdapterNotFound."""
        cached = self.host.get(lora_task_id)
        if cached is not None:
            self.host.hold(cached, False)
        elif self._traffic.find(lora_task_id) is None:
            raise AdapterNotFound(lora_task_id)

    def unload(self, lora_task_id: TaskId) -> Future[None] | None:
        """Forget an adapter, held by an operator or not: from now on new requests find it in no tier.

        Its memory is freed when the requests that use it have finished. The future is done when its file is deleted,
        which a later start would find; it raises OSError. None: it has no file. Raises AdapterNotFound.
        """
        cached = self.host.get(lora_task_id)
        known = cached or self._traffic.find(lora_task_id)
        if known is None:
            raise AdapterNotFound(lora_task_id)
        deleted = self._traffic.delete(lora_task_id) if cached is None else self._retire(cached)
        self._emit("unloaded", known)
        return deleted

    @property
    def is_busy(self) -> bool:
        """Whether `poll` has something to do, now or later."""
        is_device_busy = self.device.is_copying or self.device.has_failures
        is_admitting = self.host.num_arrivals > 0 or bool(self._given_up)
        return is_device_busy or is_admitting or self._traffic.is_busy

    def poll(self) -> dict[CachedAdapter, RequestError]:
        """Note the copies, reads and writes that have ended, and give pages to adapters that wait. Does not wait.

        Returns the adapters that could not be read from their files, copied to the device, or given pages. Their
        requests have to unpin them. An adapter whose copy failed, or whose file may be fine, can be pinned again; the
        others are forgotten.
        """
        self.device.poll()
        failed: dict[CachedAdapter, RequestError] = {**self.device.take_failures(), **self._traffic.poll()}
        self._admit()
        given_up, self._given_up = self._given_up, {}
        return failed | given_up

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until a read or a write has ended, if any is under way. For a caller that has nothing else to do."""
        wait(self._traffic.under_way, timeout_s, FIRST_COMPLETED)

    def settle(self) -> None:
        """Wait until every adapter has its pages. For the start, when there are no requests."""
        while self.host.num_arrivals:
            self.wait()
            self.poll()

    def close(self) -> None:
        """Save the adapters that the next start should find, the most recently used that fit, and end all threads."""
        self.host.close()
        self._traffic.close(self.host.latest)
        if "_copier" in vars(self):
            self._copier.shutdown()

    def check_integrity(self) -> None:
        """All tiers are sound. For tests, after every step."""
        self.memory.check_integrity()
        self._traffic.check_integrity()
        for adapter in self.host.arrivals:
            held = self.host.num_other_held_pages(adapter)
            assert held + adapter.num_pages <= self.host.pool.count, "it would wait for ever"

    def _find(self, lora_task_id: TaskId) -> CachedAdapter:
        """The current version for a use, in memory or on its way there from its file.

        Raises AdapterNotFound, or AdapterCacheFull if there can be no room to read it.
        """
        adapter = self.host.get(lora_task_id)
        if adapter is None:
            return self._read(lora_task_id)
        self.host.touch(adapter)
        return adapter

    def _admit(self) -> None:
        """Give pages to the adapters that wait for them, in order, as long as there are enough."""
        while (adapter := next(self.host.arrivals, None)) is not None:
            if self._make_room(adapter.shape):
                self.host.give_pages(adapter)
            elif self.host.can_ever_hold(adapter.shape, adapter):
                return
            else:
                self._give_up(adapter)

    def _insert(self, lora_task_id: TaskId, packed: PackedAdapter | PlannedAdapter, name: str) -> CachedAdapter:
        self._check_room(lora_task_id, self._shape_of(packed))
        file = self._traffic.find(lora_task_id)
        if file is not None and file.digest != packed.digest:
            self._traffic.delete(lora_task_id)
            self._num_replacements += 1
            self._emit("replaced", file)
        self._num_insertions += 1
        return self._add(lora_task_id, packed, name)

    def _replace(self, cached: CachedAdapter, packed: PackedAdapter | PlannedAdapter, name: str) -> CachedAdapter:
        # An unpinned old version is itself room for the new one, even one that an operator holds.
        self._check_room(cached.lora_task_id, self._shape_of(packed), replaced=cached)
        is_held = cached.state.is_held
        self._retire(cached)
        self._num_replacements += 1
        self._emit("replaced", cached)
        adapter = self._add(cached.lora_task_id, packed, name or cached.name)
        self.host.hold(adapter, is_held)
        return adapter

    def _add(self, lora_task_id: TaskId, packed: PackedAdapter | PlannedAdapter, name: str) -> CachedAdapter:
        state = AdapterState(self._traffic.file_state(lora_task_id))
        ranks, shape = ranks_of(packed.rows), self._shape_of(packed)
        kinds, traits = kinds_of(packed.rows, packed.traits), packed.traits
        adapter = CachedAdapter(lora_task_id, packed.digest, ranks, shape, name, state, kinds=kinds, traits=traits)
        adapter.entries = packed.entries or TableEntries.of(packed.rows, self.device.layout)
        if isinstance(packed, PlannedAdapter):
            arrival = Arrival(partial(self._traffic.make, adapter, packed), packed.end, packed.num_lent_pages)
        else:
            arrival = Arrival(partial(self._fill, adapter, packed))
        self._arrive(adapter, arrival)
        return adapter

    def _copied_beside(
        self, packed: PackedAdapter, copy: Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
    ) -> PlannedAdapter:
        """A packed adapter that another thread copies into its pages."""
        return PlannedAdapter(
            packed.digest,
            packed.rows,
            packed.num_pages,
            packed.traits,
            begin=lambda pages: self._copier.submit(copy, packed.pages, pages),
            end=lambda: None,
            num_lent_pages=0,
            entries=packed.entries or TableEntries.of(packed.rows, self.device.layout),
        )

    @cached_property
    def _copier(self) -> Executor:
        """Made for the first adapter that needs it."""
        return ThreadPoolExecutor(1, "adapter-copy")

    def _fill(self, adapter: CachedAdapter, packed: PackedAdapter) -> None:
        self.host.fill(adapter, packed)
        if not adapter.state.is_retired:
            self._traffic.save(adapter)

    def _read(self, lora_task_id: TaskId) -> CachedAdapter:
        file = self._traffic.find(lora_task_id)
        if file is None:
            raise AdapterNotFound(lora_task_id)
        self._check_read(file)
        # Before it can be deleted to make room for other files.
        opened = self._traffic.open(file)
        state = AdapterState(self._traffic.file_state(lora_task_id))
        kinds, traits = file.kinds, file.traits
        adapter = CachedAdapter(
            lora_task_id, file.digest, file.ranks, file.shape, file.name, state, kinds=kinds, traits=traits
        )
        self._arrive(adapter, Arrival(partial(self._traffic.read, adapter, opened), opened.close))
        return adapter

    def _arrive(self, adapter: CachedAdapter, arrival: Arrival) -> None:
        self.host.add(adapter, arrival)
        self._admit()

    def _check_room(self, lora_task_id: TaskId, shape: PageShape, replaced: CachedAdapter | None = None) -> None:
        """Raises AdapterCacheFull when there could be no room for one more adapter, after the adapters that wait
        already.
        """
        check_size(shape.num_pages, self.device.layout)
        promised, free, num_pages = self.host.num_promised_pages, self.host.pool.num_free, shape.num_pages
        if replaced is not None and not replaced.pages and replaced.state.num_pins == 0:
            promised -= replaced.num_pages
        if promised + num_pages <= free and self.host.pool.fits(shape):
            return
        reachable = self.host.num_reachable(replaced)
        if promised + num_pages > reachable or not self.host.can_hold(shape, replaced):
            raise AdapterCacheFull(lora_task_id, num_pages, free, reachable - free, promised, self.host.pool.count)

    def _check_read(self, file: DiskAdapter) -> None:
        """Raises AdapterCacheFull when a file could never be read, or too many wait for that already.

        Requests in flight are no reason: they end, and an adapter that waits for its file takes no memory.
        """
        check_size(file.num_pages, self.device.layout)
        if not self.host.can_ever_hold(file.shape) or self.host.num_arrivals >= _MAX_ARRIVALS:
            pages, promised = self.host.pool, self.host.num_promised_pages
            raise AdapterCacheFull(file.lora_task_id, file.num_pages, pages.num_free, 0, promised, pages.count)

    def _check_hold(self, adapter: CachedAdapter) -> None:
        """Raises AdapterCacheFull when one more held adapter would leave too little for an adapter that waits."""
        waiting = self.host.num_awaited_pages(adapter)
        pages, held = self.host.pool, self.host.num_held_pages
        if waiting and held + adapter.num_pages + waiting > pages.count:
            raise AdapterCacheFull(adapter.lora_task_id, adapter.num_pages, pages.num_free, 0, waiting, pages.count)

    def _give_up(self, adapter: CachedAdapter) -> None:
        """Adapters that an operator holds lie where the adapter's runs would have to be: it would wait for ever."""
        self.host.end_wait(adapter).discard()
        pages = self.host.pool
        error = AdapterCacheFull(adapter.lora_task_id, adapter.num_pages, pages.num_free, 0, 0, pages.count)
        adapter.state.move(Memory.LOST)
        adapter.arrived.set_exception(error)
        self._given_up[adapter] = error
        if not adapter.state.is_retired:
            self.host.retire(adapter)
        self.memory.update(adapter)

    def _make_room(self, shape: PageShape) -> bool:
        """Evict as many adapters as needed, and none as long as pins keep that from being enough.

        False if files have to be written first, which is started, if reads have to end, or if pins forbid it.
        """
        victims = self.host.victims_for(shape)
        for adapter in victims or ():
            if adapter.state.freed_by is FreedBy.WRITE:
                self._traffic.save(adapter)
            elif adapter.state.freed_by is FreedBy.EVICTION:
                self._evict(adapter)
        return self.host.pool.fits(shape)

    def _evict(self, adapter: CachedAdapter) -> None:
        self._traffic.touch(adapter)
        self.memory.evict(adapter)
        self._emit("evicted", adapter)

    def _shape_of(self, packed: PackedAdapter | PlannedAdapter) -> PageShape:
        return page_shape(packed.rows, packed.num_pages, self.device.layout)

    def _rename(self, adapter: CachedAdapter, name: str) -> None:
        """A file of the old name goes; it is written again when the adapter is evicted, if not before."""
        if name != adapter.name:
            adapter.name = name
            self._traffic.delete(adapter.lora_task_id)

    def _retire(self, adapter: CachedAdapter) -> Future[None] | None:
        """No request finds this version any more, in memory or as a file. Returns as `DiskTier.delete` does."""
        deleted = self._traffic.delete(adapter.lora_task_id)
        self.host.retire(adapter)
        self.memory.update(adapter)
        return deleted

    def _emit(self, kind: EventKind, adapter: CachedAdapter | DiskAdapter) -> None:
        self._on_event(adapter_event(kind, adapter.lora_task_id, adapter.digest))
