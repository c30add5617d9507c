"""`Arrivals`: which adapters come into host memory, and which have to leave for them."""

from __future__ import annotations

from functools import partial
from typing import Literal

from multilora_engine.errors import AdapterCacheFull, AdapterConflict, AdapterNotFound, RequestError
from multilora_engine.lora.adapter_file import DiskAdapter
from multilora_engine.lora.adapter_state import AdapterState, CachedAdapter, FreedBy, Memory
from multilora_engine.lora.disk_traffic import DiskTraffic
from multilora_engine.lora.format import any_dora, ranks_of
from multilora_engine.lora.host_tier import Arrival, HostTier
from multilora_engine.lora.layout import PackedAdapter, page_shape
from multilora_engine.lora.life_cycle import OnEvent, adapter_event
from multilora_engine.lora.memory_tiers import MemoryTiers
from multilora_engine.lora.names import TaskId
from multilora_wire.adapter_event import EventKind
from multilora_wire.layout import AdapterLayout, PageShape

_MAX_ARRIVALS = 256
"""Adapters on disk that may wait for room: each has a file open."""

OnConflict = Literal["refuse", "replace"]
"""`lora_on_conflict`: whether other weights under a task id that is taken are an error, or a new version."""


class Arrivals:
    """Every new version of an adapter comes in here, uploaded, fetched or read from its file, and waits for its pages.

    Pages are given in the order of arrival. Room is made by evicting adapters without users, least recently used
    first and only as many as needed; with a disk tier, adapters with files go first, and the others' files are written.
    num_insertions, num_replacements: adapters under a new task id, and new versions of known ones.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        host: HostTier,
        memory: MemoryTiers,
        traffic: DiskTraffic,
        on_conflict: OnConflict,
        on_event: OnEvent,
    ) -> None:
        self._layout = layout
        self._host = host
        self._memory = memory
        self._traffic = traffic
        self._on_conflict = on_conflict
        self._on_event = on_event
        self._given_up: dict[CachedAdapter, RequestError] = {}
        self.num_insertions = 0
        self.num_replacements = 0

    def put(
        self, lora_task_id: TaskId, packed: PackedAdapter, name: str, origin: Literal["uploaded", "downloaded"]
    ) -> CachedAdapter:
        """See `LoRAManager.put`."""
        cached = self._host.get(lora_task_id)
        known = cached or self._traffic.find(lora_task_id)
        if known is not None and known.digest != packed.digest and self._on_conflict == "refuse":
            raise AdapterConflict(lora_task_id, known.digest, packed.digest)
        if cached is not None and cached.digest == packed.digest:
            self._host.touch(cached)
            self._rename(cached, name or cached.name)
            return cached
        adapter = self._insert(lora_task_id, packed, name) if cached is None else self._replace(cached, packed, name)
        self._emit(origin, adapter)
        return adapter

    def has_room(self, packed: PackedAdapter) -> bool:
        """Whether an adapter can be put without the loss of another one."""
        return self._traffic.has_disk or self._host.pool.fits(self._shape_of(packed))

    def find(self, lora_task_id: TaskId) -> CachedAdapter:
        """The current version for a use, in memory or on its way there from its file.

        Raises AdapterNotFound, or AdapterCacheFull if there can be no room to read it.
        """
        adapter = self._host.get(lora_task_id)
        if adapter is None:
            return self._read(lora_task_id)
        self._host.touch(adapter)
        return adapter

    def hold(self, adapter: CachedAdapter) -> None:
        """Keep an adapter in memory. Raises AdapterCacheFull when that would leave too little for one that waits."""
        if not adapter.state.is_held:
            self._check_hold(adapter)
            self._host.hold(adapter, True)

    def unload(self, lora_task_id: TaskId) -> None:
        """Forget an adapter in every tier. Raises AdapterNotFound."""
        cached = self._host.get(lora_task_id)
        known = cached or self._traffic.find(lora_task_id)
        if known is None:
            raise AdapterNotFound(lora_task_id)
        if cached is not None:
            self._retire(cached)
        else:
            self._traffic.delete(lora_task_id)
        self._emit("unloaded", known)

    def admit(self) -> None:
        """Give pages to the adapters that wait for them, in order, as far as there are any."""
        while (adapter := next(self._host.arrivals, None)) is not None:
            if self._make_room(adapter.shape):
                self._host.give_pages(adapter)
            elif self._host.can_ever_hold(adapter.shape, adapter):
                return
            else:
                self._give_up(adapter)

    @property
    def has_failures(self) -> bool:
        """Whether `take_failures` has something to tell."""
        return bool(self._given_up)

    def take_failures(self) -> dict[CachedAdapter, RequestError]:
        """The adapters that were given up since; the requests that wait for them have to hear of it."""
        given_up, self._given_up = self._given_up, {}
        return given_up

    def check_integrity(self) -> None:
        for adapter in self._host.arrivals:
            held = self._host.num_other_held_pages(adapter)
            assert held + adapter.num_pages <= self._host.pool.count, "it would wait for ever"

    def _insert(self, lora_task_id: TaskId, packed: PackedAdapter, name: str) -> CachedAdapter:
        self._check_room(lora_task_id, self._shape_of(packed))
        file = self._traffic.find(lora_task_id)
        if file is not None and file.digest != packed.digest:
            self._traffic.delete(lora_task_id)
            self.num_replacements += 1
            self._emit("replaced", file)
        self.num_insertions += 1
        return self._add(lora_task_id, packed, name)

    def _replace(self, cached: CachedAdapter, packed: PackedAdapter, name: str) -> CachedAdapter:
        # An unpinned old version is itself room for the new one, even one that an operator holds.
        self._check_room(cached.lora_task_id, self._shape_of(packed), replaced=cached)
        is_held = cached.state.is_held
        self._retire(cached)
        self.num_replacements += 1
        self._emit("replaced", cached)
        adapter = self._add(cached.lora_task_id, packed, name or cached.name)
        self._host.hold(adapter, is_held)
        return adapter

    def _add(self, lora_task_id: TaskId, packed: PackedAdapter, name: str) -> CachedAdapter:
        state = AdapterState(self._traffic.file_state(lora_task_id))
        ranks, shape = ranks_of(packed.rows), self._shape_of(packed)
        adapter = CachedAdapter(lora_task_id, packed.digest, ranks, shape, name, state, is_dora=any_dora(packed.rows))
        self._arrive(adapter, Arrival(partial(self._fill, adapter, packed)))
        return adapter

    def _fill(self, adapter: CachedAdapter, packed: PackedAdapter) -> None:
        self._host.fill(adapter, packed)
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
        adapter = CachedAdapter(
            lora_task_id, file.digest, file.ranks, file.shape, file.name, state, is_dora=file.is_dora
        )
        self._arrive(adapter, Arrival(partial(self._traffic.read, adapter, opened), opened.close))
        return adapter

    def _arrive(self, adapter: CachedAdapter, arrival: Arrival) -> None:
        self._host.add(adapter, arrival)
        self.admit()

    def _check_room(self, lora_task_id: TaskId, shape: PageShape, replaced: CachedAdapter | None = None) -> None:
        """Raises AdapterCacheFull when there could be no room for one more adapter, after the adapters that wait
        already.
        """
        promised, free, num_pages = self._host.num_promised_pages, self._host.pool.num_free, shape.num_pages
        if replaced is not None and not replaced.pages and replaced.state.num_pins == 0:
            promised -= replaced.num_pages
        if promised + num_pages <= free and self._host.pool.fits(shape):
            return
        reachable = self._host.num_reachable(replaced)
        if promised + num_pages > reachable or not self._host.can_hold(shape, replaced):
            raise AdapterCacheFull(lora_task_id, num_pages, free, reachable - free, promised, self._host.pool.count)

    def _check_read(self, file: DiskAdapter) -> None:
        """Raises AdapterCacheFull when a file could never be read, or too many wait for that already.

        Requests in flight are no reason: they end, and an adapter that waits for its file takes no memory.
        """
        if not self._host.can_ever_hold(file.shape) or self._host.num_arrivals >= _MAX_ARRIVALS:
            pages, promised = self._host.pool, self._host.num_promised_pages
            raise AdapterCacheFull(file.lora_task_id, file.num_pages, pages.num_free, 0, promised, pages.count)

    def _check_hold(self, adapter: CachedAdapter) -> None:
        """Raises AdapterCacheFull when one more held adapter would leave too little for an adapter that waits."""
        waiting = max((other.num_pages for other in self._host.arrivals if other is not adapter), default=0)
        pages, held = self._host.pool, self._host.num_held_pages
        if waiting and held + adapter.num_pages + waiting > pages.count:
            raise AdapterCacheFull(adapter.lora_task_id, adapter.num_pages, pages.num_free, 0, waiting, pages.count)

    def _give_up(self, adapter: CachedAdapter) -> None:
        """Adapters that an operator holds lie where the adapter's runs would have to be: it would wait for ever."""
        self._host.end_wait(adapter).discard()
        pages = self._host.pool
        error = AdapterCacheFull(adapter.lora_task_id, adapter.num_pages, pages.num_free, 0, 0, pages.count)
        adapter.state.move(Memory.LOST)
        adapter.arrived.set_exception(error)
        self._given_up[adapter] = error
        if not adapter.state.is_retired:
            self._host.retire(adapter)
        self._memory.update(adapter)

    def _make_room(self, shape: PageShape) -> bool:
        """Evict as many adapters as needed, and none as long as pins keep that from being enough.

        False if files have to be written first, which is started, if reads have to end, or if pins forbid it.
        """
        victims = self._host.victims_for(shape)
        for adapter in victims or ():
            if adapter.state.freed_by is FreedBy.WRITE:
                self._traffic.save(adapter)
            elif adapter.state.freed_by is FreedBy.EVICTION:
                self._evict(adapter)
        return self._host.pool.fits(shape)

    def _evict(self, adapter: CachedAdapter) -> None:
        self._traffic.touch(adapter)
        self._memory.evict(adapter)
        self._emit("evicted", adapter)

    def _shape_of(self, packed: PackedAdapter) -> PageShape:
        return page_shape(packed.rows, len(packed.pages), self._layout)

    def _rename(self, adapter: CachedAdapter, name: str) -> None:
        """A file of the old name goes; it is written again when the adapter is evicted, if not before."""
        if name != adapter.name:
            adapter.name = name
            self._traffic.delete(adapter.lora_task_id)

    def _retire(self, adapter: CachedAdapter) -> None:
        """No request finds this version any more, in memory or as a file."""
        self._traffic.delete(adapter.lora_task_id)
        self._host.retire(adapter)
        self._memory.update(adapter)

    def _emit(self, kind: EventKind, adapter: CachedAdapter | DiskAdapter) -> None:
        self._on_event(adapter_event(kind, adapter.lora_task_id, adapter.digest))
