"""`LoRAManager`: put, pin, acquire, release, unpin, unload. The only writer of all tiers."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Set
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

from multilora_engine.errors import AdapterCacheFull, AdapterConflict, AdapterNotFound, AdapterNotLoaded, RequestError
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.disk_tier import DamagedFile, DiskAdapter, DiskTier
from multilora_engine.lora.format import ranks_of
from multilora_engine.lora.host_tier import CachedAdapter, HostTier
from multilora_engine.lora.layout import PackedAdapter, page_shape
from multilora_engine.lora.life_cycle import (
    AdapterEvent,
    EventKind,
    LoRAStats,
    OnEvent,
    TierStats,
    ignore_event,
)
from multilora_engine.lora.names import TaskId, label_of, number_of, tenant_of
from multilora_engine.lora.residency import Level, Residency, Resident
from multilora_kernels import LoRATables
from multilora_wire.adapter_info import AdapterInfo
from multilora_wire.layout import AdapterLayout, PageShape

_MAX_ARRIVALS = 256
"""Adapters on disk that may wait for room: each has a file open."""


_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of reading a file that say nothing about the file."""


@dataclass(frozen=True)
class _Arrival:
    """What becomes of an adapter that waits for its pages: they are there, or nobody wants them any more."""

    fill: Callable[[], None]
    discard: Callable[[], None] = lambda: None


class LoRAManager:
    """Owns every adapter of the engine.

    The life of a request's adapter: `put` when its weights came along, `pin` when the request is accepted, `acquire`
    when it may start to run, `release` when it stops running (finished or preempted), `unpin` when it is finished.
    Nothing pinned is evicted or replaced in place, nothing acquired leaves the device.

    With a disk tier, every adapter that comes is written there behind its back, so that it can be evicted at once when
    its place is wanted; `pin` brings it back. Nothing waits for the disk: pages are held until they are written, and
    while no others can be had, an adapter waits for its own in the order of arrival. It can be pinned from the start,
    and acquired once `poll` has taken up that it is here. A file and an adapter in host memory that share a task id are
    the same version, always.
    """

    def __init__(
        self,
        host: HostTier,
        device: DeviceTier,
        on_conflict: Literal["refuse", "replace"],
        on_event: OnEvent = ignore_event,
        disk: DiskTier | None = None,
    ) -> None:
        self._host = host
        self._device = device
        self._disk = disk
        self._on_conflict = on_conflict
        self._on_event = on_event
        self._hits = 0
        self._misses = 0
        self._insertions = 0
        self._replacements = 0
        self._waits = 0
        self._wait_seconds = 0.0
        self._arrivals: dict[CachedAdapter, _Arrival] = {}
        self._load_started: dict[CachedAdapter, float] = {}
        self._waiting_since: dict[CachedAdapter, float] = {}
        self._given_up: dict[CachedAdapter, RequestError] = {}

    @property
    def tables(self) -> LoRATables:
        return self._device.tables

    @property
    def layout(self) -> AdapterLayout:
        return self._device.layout

    @property
    def num_cached(self) -> int:
        """Adapters in the host tier."""
        return len(self._host)

    @property
    def stats(self) -> LoRAStats:
        return LoRAStats(
            device=self._device.stats,
            host=self._host.stats(self._hits, self._misses),
            disk=TierStats() if self._disk is None else self._disk.stats,
            insertions=self._insertions,
            replacements=self._replacements,
            waits=self._waits,
            wait_seconds=self._wait_seconds,
        )

    def describe(self) -> list[AdapterInfo]:
        """The current version of every adapter: those on disk alone, then the others, least recently used first."""
        cached = self._host.current
        tasks = {adapter.lora_task_id for adapter in cached}
        on_disk = [] if self._disk is None else [a for a in self._disk.adapters if a.lora_task_id not in tasks]
        return [_describe_file(adapter) for adapter in on_disk] + [self._describe(adapter) for adapter in cached]

    def residency(self, max_adapters: int) -> Residency:
        """Who is in memory; `max_adapters` of them one by one, which costs no look at the others."""
        on_device = (_resident(a, "gpu") for a in self._device.latest if not a.is_retired)
        in_memory = (_resident(a, "cpu") for a in self._host.latest if a.rows and not self._device.has(a))
        return Residency(
            adapters=list(islice(chain(on_device, in_memory), max_adapters)),
            num_on_device=len(self._device),
            num_in_memory=len(self._host),
            max_loras=self._device.max_loras,
            load_seconds=self._host.load_seconds,
            activate_seconds=self._device.copy_seconds,
        )

    def info(self, lora_task_id: TaskId) -> AdapterInfo:
        """The current version of one adapter, in whatever tier. Raises AdapterNotFound."""
        cached = self._host.get(lora_task_id)
        if cached is not None:
            return self._describe(cached)
        file = self._find_file(lora_task_id)
        if file is None:
            raise AdapterNotFound(lora_task_id)
        return _describe_file(file)

    def put(
        self,
        lora_task_id: TaskId,
        packed: PackedAdapter,
        name: str = "",
        origin: Literal["uploaded", "downloaded"] = "uploaded",
    ) -> CachedAdapter:
        """Cache an adapter under a task id. The same content again is only a touch.

        name: replaces the name it has, unless empty. origin: sent by a client, or fetched from a source.
        `packed` must stay as it is: an adapter that waits for room is copied later. Raises AdapterConflict (other
        content, `lora_on_conflict` is `refuse`) or AdapterCacheFull; the cache is then as it was.
        """
        cached = self._host.get(lora_task_id)
        known = cached or self._find_file(lora_task_id)
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
        """Whether an adapter can be put without that another one is lost."""
        return self._disk is not None or self._host.pool.fits(self._shape_of(packed))

    def keep(self, lora_task_id: TaskId) -> Future[None] | None:
        """Have an adapter in host memory written to the disk tier, where it survives the death of the engine.

        The future is done when it is; it raises OSError if it cannot be written, which every call tries again, and is
        cancelled if the adapter is replaced or unloaded before. None without a disk tier. Raises AdapterNotFound.
        """
        adapter = self._host.get(lora_task_id)
        if adapter is None:
            raise AdapterNotFound(lora_task_id)
        if self._disk is None:
            return None
        self._disk.poll()
        if adapter.rows:
            self._spill(adapter, self._disk)
        return adapter.kept

    def is_known(self, lora_task_id: TaskId) -> bool:
        """Whether an adapter is in some tier."""
        return self._host.get(lora_task_id) is not None or self._find_file(lora_task_id) is not None

    def digest(self, lora_task_id: TaskId) -> str:
        """The digest of the current version, in whatever tier. Raises AdapterNotFound."""
        known = self._host.get(lora_task_id) or self._find_file(lora_task_id)
        if known is None:
            raise AdapterNotFound(lora_task_id)
        return known.digest

    def pin(self, lora_task_id: TaskId) -> CachedAdapter:
        """Hold the current version of an adapter in the host tier for a request, or have it read from disk into it.

        Raises AdapterNotFound, or AdapterCacheFull if it is on disk and there can be no room to read it.
        """
        self._count_request(lora_task_id)
        adapter = self._find(lora_task_id)
        self._device.count_request(adapter)
        adapter.num_pins += 1
        adapter.num_hits += 1
        adapter.last_used_s = time.time()
        return adapter

    def unpin(self, adapter: CachedAdapter) -> None:
        assert adapter.num_pins > 0
        adapter.num_pins -= 1
        if adapter.num_pins == 0:
            self._waiting_since.pop(adapter, None)
            self._device.forget_failure(adapter)
            self._remove_if_unused(adapter)

    def load(self, lora_task_id: TaskId) -> Future[None]:
        """Have one on disk read into the host tier. Raises AdapterNotFound, or AdapterCacheFull without room.

        The future is done when it is there. It raises RequestError if the file cannot be read, and is cancelled if the
        adapter is replaced or unloaded before.
        """
        return self._find(lora_task_id).arrived

    def pin_adapter(self, lora_task_id: TaskId) -> Future[None]:
        """Never evict this adapter, nor a version that replaces it, until `unpin_adapter`. One on disk is read.

        The future is that of `load`. Raises AdapterNotFound, or AdapterCacheFull if there is no room to read it, or
        none would be left for another one that waits.
        """
        adapter = self._find(lora_task_id)
        if not adapter.is_pinned:
            self._check_pin(adapter)
            adapter.is_pinned = True
        return adapter.arrived

    def unpin_adapter(self, lora_task_id: TaskId) -> None:
        """Let an adapter be evicted again. Raises AdapterNotFound."""
        cached = self._host.get(lora_task_id)
        if cached is not None:
            cached.is_pinned = False
        elif self._find_file(lora_task_id) is None:
            raise AdapterNotFound(lora_task_id)

    def unload(self, lora_task_id: TaskId) -> None:
        """Forget an adapter, pinned by an operator or not: new requests do not find it from now on, in any tier.

        Its memory is freed when the requests that use it have finished. Raises AdapterNotFound.
        """
        cached = self._host.get(lora_task_id)
        known = cached or self._find_file(lora_task_id)
        if known is None:
            raise AdapterNotFound(lora_task_id)
        if cached is not None:
            self._retire(cached)
        else:
            self._delete_file(lora_task_id)
        self._emit("unloaded", known)

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that `poll` will have to take up."""
        is_disk_busy = self._disk is not None and bool(self._disk.writes)
        has_failures = self._device.has_failures or bool(self._given_up)
        return bool(self._arrivals or self._load_started or has_failures or is_disk_busy)

    def poll(self) -> dict[CachedAdapter, RequestError]:
        """Take up what was read from and written to disk since, and let in who waits for room. Does not wait.

        Returns the adapters that could not be read from their files, or not be copied to the device. Whoever pinned one
        has to give it up. One whose copy failed, or whose file may be fine, can be pinned again; the others are
        forgotten.
        """
        failed: dict[CachedAdapter, RequestError] = dict(self._device.take_failures())
        if self._disk is None:
            return failed
        self._disk.poll()
        for adapter in [a for a in self._load_started if a.load is not None and a.load.done()]:
            error = self._finish_load(adapter, self._disk)
            if error is not None:
                failed[adapter] = error
        self._admit_arrivals()
        given_up, self._given_up = self._given_up, {}
        return failed | given_up

    def wait(self, timeout_s: float | None = None) -> None:
        """For who has nothing else to do: wait until `poll` has something to take up, if there will be anything."""
        under_way: list[Future[Any]] = [] if self._disk is None else [*self._disk.writes]
        under_way += [adapter.load for adapter in self._load_started if adapter.load is not None]
        wait(under_way, timeout_s, FIRST_COMPLETED)

    def settle(self) -> None:
        """For the start, when no request waits: wait until every adapter has its room."""
        while self._arrivals:
            self.wait()
            self.poll()

    def close(self) -> None:
        """Keep what the next start should find, the most recently used that fit, and end the disk tier's threads."""
        if self._disk is None:
            return
        for arrival in self._arrivals.values():
            arrival.discard()
        room, kept = self._disk.num_bytes, []
        for adapter in reversed(self._host.current):
            room -= self._host.num_bytes(adapter)
            if room > 0 and adapter.rows:
                kept.append(adapter)
        for adapter in reversed(kept):
            self._spill(adapter, self._disk)
        self._disk.close()

    def prefetch(self, adapter: CachedAdapter, wanted: Set[CachedAdapter]) -> None:
        """Start to bring a pinned adapter to the device, if it is in memory and none of `wanted` has to go for it."""
        assert adapter.num_pins > 0
        if adapter.rows:
            self._device.prefetch(adapter, wanted)

    def acquire(self, adapter: CachedAdapter, wanted: Set[CachedAdapter] = frozenset()) -> bool:
        """Make a pinned adapter usable by the next step, for one sequence more.

        False when it has to wait: it is still being read from disk, its copy to the device was started by this call or
        is still under way, there is no room for it on the device (adapters in `wanted` are not evicted for it), or
        `max_loras` others are in use.
        """
        assert adapter.num_pins > 0
        is_usable = (
            bool(adapter.rows)
            and self._device.prefetch(adapter, wanted)
            and self._device.is_ready(adapter)
            and self._device.acquire(adapter)
        )
        self._count_wait(adapter, is_usable)
        return is_usable

    def release(self, adapter: CachedAdapter) -> None:
        """The counterpart of `acquire`."""
        self._device.release(adapter)

    def lora_index(self, adapter: CachedAdapter) -> int:
        """The row of an acquired adapter in `tables`."""
        return self._device.lora_index(adapter)

    def check_integrity(self) -> None:
        """All tiers are sound. For tests, after every step."""
        self._host.check_integrity()
        self._device.check_integrity()
        for adapter in self._arrivals:
            assert not adapter.pages
            assert not adapter.rows
            assert adapter.load is None
            assert not adapter.is_being_written
            assert self._host.num_kept(adapter) + adapter.num_pages <= self._host.pool.count, "it would wait for ever"
        assert all(adapter.pages or adapter in self._arrivals for adapter in self._host.adapters)
        assert self._load_started.keys() == {adapter for adapter in self._host.adapters if adapter.load is not None}
        if self._disk is not None:
            self._disk.check_integrity()
            for adapter in self._host.current:
                assert adapter.kept.done() or adapter.is_being_written or not adapter.rows, "nobody will hear of it"
            files = {file.lora_task_id: file.digest for file in self._disk.adapters}
            for adapter in self._host.current:
                assert files.get(adapter.lora_task_id, adapter.digest) == adapter.digest, "a file of an old version"

    @property
    def num_pins(self) -> int:
        """Pins of all adapters: the requests in flight that have one."""
        return sum(adapter.num_pins for adapter in self._host.adapters)

    def _find(self, lora_task_id: TaskId) -> CachedAdapter:
        adapter = self._host.get(lora_task_id)
        if adapter is None:
            return self._start_load(lora_task_id)
        self._host.touch(adapter)
        return adapter

    def _find_file(self, lora_task_id: TaskId) -> DiskAdapter | None:
        return None if self._disk is None else self._disk.find(lora_task_id)

    def _delete_file(self, lora_task_id: TaskId) -> None:
        if self._disk is not None:
            self._disk.delete(lora_task_id)

    def _start_load(self, lora_task_id: TaskId) -> CachedAdapter:
        file = self._find_file(lora_task_id)
        if file is None or self._disk is None:
            raise AdapterNotFound(lora_task_id)
        self._check_load(file)
        # Before it can be deleted to make room for other files.
        opened = self._disk.open(lora_task_id)
        adapter = CachedAdapter(lora_task_id, file.digest, file.ranks, file.shape, file.name)
        adapter.kept.set_result(None)

        def fill() -> None:
            self._load_started[adapter] = time.perf_counter()
            adapter.load = opened.read(self._host.views(adapter))

        self._arrive(adapter, _Arrival(fill, opened.close))
        return adapter

    def _check_room(self, lora_task_id: TaskId, shape: PageShape, replaced: CachedAdapter | None = None) -> None:
        """Raises AdapterCacheFull when there could not be room for one more, after those that wait for it already."""
        promised = sum(a.num_pages for a in self._arrivals if a is not replaced or a.num_pins)
        free, num_pages = self._host.pool.num_free, shape.num_pages
        if promised + num_pages <= free and self._host.pool.fits(shape):
            return
        reachable = self._host.num_reachable(replaced)
        if promised + num_pages > reachable or not self._host.can_hold(shape, replaced):
            raise AdapterCacheFull(lora_task_id, num_pages, free, reachable - free, promised, self._host.pool.count)

    def _check_load(self, file: DiskAdapter) -> None:
        """Raises AdapterCacheFull when a file could never be read, or too many wait for that already.

        Requests in flight are no reason: those end, and one that waits for its file takes no memory.
        """
        pages, kept = self._host.pool, self._host.num_kept()
        fits = kept + file.num_pages <= pages.count and self._host.can_ever_hold(file.shape)
        if not fits or len(self._arrivals) >= _MAX_ARRIVALS:
            promised = sum(adapter.num_pages for adapter in self._arrivals)
            raise AdapterCacheFull(file.lora_task_id, file.num_pages, pages.num_free, 0, promised, pages.count)

    def _check_pin(self, adapter: CachedAdapter) -> None:
        """Raises AdapterCacheFull when keeping one more would leave too little for an adapter that waits."""
        waiting = max((other.num_pages for other in self._arrivals if other is not adapter), default=0)
        pages = self._host.pool
        if waiting and self._host.num_kept(adapter) + adapter.num_pages + waiting > pages.count:
            raise AdapterCacheFull(adapter.lora_task_id, adapter.num_pages, pages.num_free, 0, waiting, pages.count)

    def _arrive(self, adapter: CachedAdapter, arrival: _Arrival) -> None:
        self._host.add(adapter)
        self._arrivals[adapter] = arrival
        self._admit_arrivals()

    def _admit_arrivals(self) -> None:
        """Give pages to those that wait for them, in order, as far as there are any."""
        while self._arrivals:
            adapter = next(iter(self._arrivals))
            if not self._make_room(adapter.shape):
                if self._host.can_ever_hold(adapter.shape):
                    return
                self._give_up(adapter)
                continue
            arrival = self._arrivals.pop(adapter)
            self._host.give_pages(adapter)
            arrival.fill()

    def _give_up(self, adapter: CachedAdapter) -> None:
        """An operator's pins lie where the adapter's runs would have to be: it would wait for ever."""
        self._arrivals.pop(adapter).discard()
        pages = self._host.pool
        error = AdapterCacheFull(adapter.lora_task_id, adapter.num_pages, pages.num_free, 0, 0, pages.count)
        adapter.arrived.set_exception(error)
        self._given_up[adapter] = error
        self._host.retire(adapter)
        self._remove_if_unused(adapter)

    def _make_room(self, shape: PageShape) -> bool:
        """Evict as many as needed, and none as long as pins keep that from being enough.

        False if it takes files to be written first, which is started, or pins to end.
        """
        victims = self._host.victims_for(shape, lambda a: a.is_evictable and self._can_go_at_once(a))
        if victims is None:
            self._prepare_room(shape)
            return False
        for adapter in victims:
            self._evict(adapter)
        return True

    def _prepare_room(self, shape: PageShape) -> None:
        """Evict and have written what has to go for a shape that cannot be had at once."""
        for adapter in self._host.victims_for(shape, lambda adapter: True) or ():
            if adapter.is_evictable and self._can_go_at_once(adapter):
                self._evict(adapter)
            elif adapter.is_evictable and self._disk is not None:
                self._spill(adapter, self._disk)

    def _can_go_at_once(self, adapter: CachedAdapter) -> bool:
        return self._disk is None or adapter.is_unkeepable or self._disk.find(adapter.lora_task_id) is not None

    def _finish_load(self, adapter: CachedAdapter, disk: DiskTier) -> RequestError | None:
        """Take up a load that has ended; an error if its file could not be read."""
        started, load = self._load_started.pop(adapter), adapter.load
        assert load is not None
        adapter.load = None
        failure = load.exception()
        error: RequestError | None = None
        if failure is None:
            adapter.rows = load.result()
            adapter.arrived.set_result(None)
            self._host.count_load(time.perf_counter() - started)
            self._emit("loaded_from_disk", adapter)
        elif isinstance(failure, DamagedFile | OSError):
            error = self._note_unreadable(adapter, failure, disk)
            adapter.arrived.set_exception(error)
            if not adapter.is_retired:
                self._host.retire(adapter)
        else:
            raise failure
        self._remove_if_unused(adapter)
        return error

    def _note_unreadable(self, adapter: CachedAdapter, failure: DamagedFile | OSError, disk: DiskTier) -> RequestError:
        if isinstance(failure, OSError) and failure.errno in _SHORTAGES:
            disk.note_unread(adapter.lora_task_id, failure)
            return AdapterNotLoaded(adapter.lora_task_id, f"reading its file failed: {failure.strerror}")
        disk.drop_damaged(adapter.lora_task_id, adapter.digest, failure)
        return AdapterNotFound(adapter.lora_task_id, "its file in lora_cache_dir could not be read")

    def _count_request(self, lora_task_id: TaskId) -> None:
        if self._host.get(lora_task_id) is not None:
            self._hits += 1
            return
        self._misses += 1
        if self._disk is not None:
            self._disk.count_request(lora_task_id)

    def _describe(self, adapter: CachedAdapter) -> AdapterInfo:
        is_on_device = adapter in self._device
        is_ready = is_on_device and self._device.is_ready(adapter)
        return AdapterInfo(
            lora_task_id=number_of(adapter.lora_task_id),
            tenant=tenant_of(adapter.lora_task_id),
            name=adapter.name,
            digest=adapter.digest,
            status="READY_FOR_USE" if is_ready else "LOADED" if is_on_device else "DOWNLOADED",
            location="DEVICE" if is_on_device else "HOST",
            bytes=self._host.num_bytes(adapter),
            ranks=adapter.ranks,
            num_pins=adapter.num_pins,
            is_pinned=adapter.is_pinned,
            last_used_s=adapter.last_used_s,
            num_hits=adapter.num_hits,
        )

    def _insert(self, lora_task_id: TaskId, packed: PackedAdapter, name: str) -> CachedAdapter:
        self._check_room(lora_task_id, self._shape_of(packed))
        file = self._find_file(lora_task_id)
        if file is not None and file.digest != packed.digest:
            self._delete_file(lora_task_id)
            self._replacements += 1
            self._emit("replaced", file)
        self._insertions += 1
        return self._add(lora_task_id, packed, name)

    def _replace(self, cached: CachedAdapter, packed: PackedAdapter, name: str) -> CachedAdapter:
        # An unpinned old version is itself room for the new one, even one that an operator pinned.
        self._check_room(cached.lora_task_id, self._shape_of(packed), replaced=cached)
        is_pinned = cached.is_pinned
        self._retire(cached)
        self._replacements += 1
        self._emit("replaced", cached)
        adapter = self._add(cached.lora_task_id, packed, name or cached.name)
        adapter.is_pinned = is_pinned
        return adapter

    def _add(self, lora_task_id: TaskId, packed: PackedAdapter, name: str) -> CachedAdapter:
        ranks = ranks_of(packed.rows)
        adapter = CachedAdapter(lora_task_id, packed.digest, ranks, self._shape_of(packed), name)

        def fill() -> None:
            self._host.fill(adapter, packed)
            if self._disk is not None and not adapter.is_retired:
                self._spill(adapter, self._disk)

        self._arrive(adapter, _Arrival(fill))
        return adapter

    def _shape_of(self, packed: PackedAdapter) -> PageShape:
        return page_shape(packed.rows, len(packed.pages), self.layout)

    def _rename(self, adapter: CachedAdapter, name: str) -> None:
        """A file of the old name goes; it is written again when the adapter is evicted, if not before."""
        if name != adapter.name:
            adapter.name = name
            self._delete_file(adapter.lora_task_id)

    def _evict(self, adapter: CachedAdapter) -> None:
        self._device.drop(adapter)
        if self._disk is not None and self._disk.find(adapter.lora_task_id) is not None:
            self._disk.touch(adapter.lora_task_id)
        self._host.evict(adapter)
        self._emit("evicted", adapter)

    def _spill(self, adapter: CachedAdapter, disk: DiskTier) -> None:
        """Have an adapter's file written, unless there is one, or will be."""
        if disk.find(adapter.lora_task_id) is not None:
            if not adapter.kept.done():
                adapter.kept.set_result(None)
            return
        if adapter.is_being_written:
            return

        def end(error: OSError | None) -> None:
            adapter.is_being_written = False
            adapter.is_unkeepable = error is not None
            self._remove_if_unused(adapter)

        adapter.is_being_written = True
        if adapter.kept.done():
            adapter.kept = Future()
        pages = self._host.views(adapter)
        write = disk.store(adapter.lora_task_id, adapter.digest, adapter.name, adapter.rows, pages, end)
        write.add_done_callback(partial(_tell_kept, adapter.kept))

    def _retire(self, adapter: CachedAdapter) -> None:
        """Nobody finds this version any more, in memory or as a file."""
        self._host.retire(adapter)
        self._delete_file(adapter.lora_task_id)
        self._remove_if_unused(adapter)

    def _remove_if_unused(self, adapter: CachedAdapter) -> None:
        """Free a retired adapter's pages once no request, read or write needs them."""
        if not adapter.is_retired or adapter.num_pins or adapter.load is not None or adapter.is_being_written:
            return
        arrival = self._arrivals.pop(adapter, None)
        if arrival is not None:
            arrival.discard()
        adapter.arrived.cancel()
        adapter.kept.cancel()
        self._device.drop(adapter)
        self._host.remove(adapter)

    def _count_wait(self, adapter: CachedAdapter, is_usable: bool) -> None:
        if not is_usable:
            self._waiting_since.setdefault(adapter, time.monotonic())
        elif adapter in self._waiting_since:
            self._waits += 1
            self._wait_seconds += time.monotonic() - self._waiting_since.pop(adapter)

    def _emit(self, kind: EventKind, adapter: CachedAdapter | DiskAdapter) -> None:
        self._on_event(AdapterEvent.of(kind, adapter.lora_task_id, adapter.digest))


def _tell_kept(kept: Future[None], write: Future[float]) -> None:
    """Called on the disk tier's thread when a write has ended, or where it is cancelled."""
    with suppress(InvalidStateError):  # written before, or not wanted any more
        if write.cancelled():
            kept.cancel()
        elif (error := write.exception()) is not None:
            kept.set_exception(error)
        else:
            kept.set_result(None)


def _resident(adapter: CachedAdapter, level: Level) -> Resident:
    return Resident(
        label_of(adapter.lora_task_id, adapter.name), level, adapter.is_pinned, max(adapter.ranks, default=0)
    )


def _describe_file(adapter: DiskAdapter) -> AdapterInfo:
    return AdapterInfo(
        lora_task_id=number_of(adapter.lora_task_id),
        tenant=tenant_of(adapter.lora_task_id),
        name=adapter.name,
        digest=adapter.digest,
        status="DOWNLOADED",
        location="DISK",
        bytes=adapter.num_bytes,
        ranks=adapter.ranks,
        num_pins=0,
        is_pinned=False,
        last_used_s=adapter.last_used_s,
        num_hits=0,
    )
