"""`LoRAManager`: put, pin, acquire, release, unpin, unload. The only writer of all tiers."""

from __future__ import annotations

import time
from collections.abc import Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Literal

from multilora_engine.errors import AdapterCacheFull, AdapterConflict, AdapterNotFound
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.disk_tier import DamagedFile, DiskAdapter, DiskTier
from multilora_engine.lora.format import PackedAdapter
from multilora_engine.lora.host_tier import CachedAdapter, HostTier
from multilora_engine.lora.life_cycle import (
    AdapterEvent,
    AdapterInfo,
    EventKind,
    LoRAStats,
    OnEvent,
    TierStats,
    ignore_event,
)
from multilora_kernels import LoRATables


class LoRAManager:
    """Owns every adapter of the engine.

    The life of a request's adapter: `put` when its weights came along, `pin` when the request is accepted, `acquire`
    when it may start to run, `release` when it stops running (finished or preempted), `unpin` when it is finished.
    Nothing pinned is evicted or replaced in place, nothing acquired leaves the device.

    With a disk tier, what is evicted from host memory is spilled there, unless `keep` had it written before, and `pin`
    brings it back without waiting: until `poll` has taken up that it is read, it cannot be acquired. A file and an
    adapter in host memory that share a task id are the same version, always.
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
        self._load_started: dict[CachedAdapter, float] = {}
        self._waiting_since: dict[CachedAdapter, float] = {}

    @property
    def tables(self) -> LoRATables:
        return self._device.tables

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

    def info(self, lora_task_id: int) -> AdapterInfo:
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
        lora_task_id: int,
        packed: PackedAdapter,
        name: str = "",
        origin: Literal["uploaded", "downloaded"] = "uploaded",
    ) -> CachedAdapter:
        """Cache an adapter under a task id. The same content again is only a touch.

        name: replaces the name it has, unless empty. origin: sent by a client, or fetched from a source.
        Raises AdapterConflict (other content, `lora_on_conflict` is `refuse`) or AdapterCacheFull; the cache is then
        as it was.
        """
        cached = self._host.get(lora_task_id)
        known = cached or self._find_file(lora_task_id)
        if known is not None and known.digest != packed.digest and self._on_conflict == "refuse":
            raise AdapterConflict(lora_task_id, known.digest, packed.digest)
        if cached is not None and cached.digest == packed.digest:
            cached.name = name or cached.name
            return cached
        adapter = self._insert(lora_task_id, packed, name) if cached is None else self._replace(cached, packed, name)
        self._emit(origin, adapter)
        return adapter

    def keep(self, lora_task_id: int) -> Future[float] | None:
        """Have an adapter in host memory written to the disk tier now, so that it survives the death of the engine.

        The future is done with the write, and raises OSError if that failed. None if there is nothing to write: no disk
        tier, or the adapter is just being read from there. Raises AdapterNotFound.
        """
        adapter = self._host.get(lora_task_id)
        if adapter is None:
            raise AdapterNotFound(lora_task_id)
        return None if self._disk is None or adapter.load is not None else self._spill(adapter, self._disk)

    def has_room(self, packed: PackedAdapter) -> bool:
        """Whether an adapter can be put without that another one is lost."""
        return self._disk is not None or len(packed.pages) <= self._host.pool.num_free

    def is_known(self, lora_task_id: int) -> bool:
        """Whether an adapter is in some tier."""
        return self._host.get(lora_task_id) is not None or self._find_file(lora_task_id) is not None

    def digest(self, lora_task_id: int) -> str:
        """The digest of the current version, in whatever tier. Raises AdapterNotFound."""
        known = self._host.get(lora_task_id) or self._find_file(lora_task_id)
        if known is None:
            raise AdapterNotFound(lora_task_id)
        return known.digest

    def pin(self, lora_task_id: int) -> CachedAdapter:
        """Hold the current version of an adapter in the host tier for a request, or have it read from disk into it.

        Raises AdapterNotFound, or AdapterCacheFull if there is no room to read it.
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
            if adapter.is_retired and adapter.load is None:
                self._remove(adapter)

    def load(self, lora_task_id: int) -> None:
        """Have one on disk read into the host tier. Raises AdapterNotFound, or AdapterCacheFull without room."""
        self._find(lora_task_id)

    def pin_adapter(self, lora_task_id: int) -> None:
        """Never evict this adapter, nor a version that replaces it, until `unpin_adapter`. One on disk is read.

        Raises AdapterNotFound, or AdapterCacheFull if there is no room to read it.
        """
        self._find(lora_task_id).is_pinned = True

    def unpin_adapter(self, lora_task_id: int) -> None:
        """Let an adapter be evicted again. Raises AdapterNotFound."""
        cached = self._host.get(lora_task_id)
        if cached is not None:
            cached.is_pinned = False
        elif self._find_file(lora_task_id) is None:
            raise AdapterNotFound(lora_task_id)

    def unload(self, lora_task_id: int) -> None:
        """Forget an adapter, pinned by an operator or not: new requests do not find it from now on, in any tier.

        Its memory is freed when the requests that use it have finished. Raises AdapterNotFound.
        """
        cached = self._host.get(lora_task_id)
        known = cached or self._find_file(lora_task_id)
        if known is None:
            raise AdapterNotFound(lora_task_id)
        if cached is not None:
            self._retire(cached)
        self._delete_file(lora_task_id)
        self._emit("unloaded", known)

    def poll(self) -> dict[CachedAdapter, AdapterNotFound]:
        """Take up what was read from and written to disk since. Does not wait.

        Returns the adapters whose files turned out to be damaged. They can never be acquired and are forgotten; whoever
        pinned one has to give it up.
        """
        if self._disk is None:
            return {}
        self._disk.poll()
        failed = {}
        for adapter in [a for a in self._load_started if a.load is not None and a.load.done()]:
            error = self._finish_load(adapter, self._disk)
            if error is not None:
                failed[adapter] = error
        return failed

    def wait_for_load(self, timeout_s: float) -> None:
        """For who has nothing else to do: wait until `poll` has an adapter to take up, if one is being read at all."""
        wait([a.load for a in self._load_started if a.load is not None], timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """Spill what the next start should find, the most recently used that fit, and end the disk tier's threads."""
        if self._disk is None:
            return
        room, spilled = self._disk.num_bytes, []
        for adapter in reversed(self._host.current):
            room -= self._host.num_bytes(adapter)
            if room > 0 and adapter.load is None:
                spilled.append(adapter)
        for adapter in reversed(spilled):
            self._spill(adapter, self._disk)
        self._disk.close()

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
        assert self._load_started.keys() == {adapter for adapter in self._host.adapters if adapter.load is not None}
        if self._disk is not None:
            self._disk.check_integrity()
            files = {file.lora_task_id: file.digest for file in self._disk.adapters}
            for adapter in self._host.current:
                assert files.get(adapter.lora_task_id, adapter.digest) == adapter.digest, "a file of an old version"

    @property
    def num_pins(self) -> int:
        """Pins of all adapters: the requests in flight that have one."""
        return sum(adapter.num_pins for adapter in self._host.adapters)

    def _find(self, lora_task_id: int) -> CachedAdapter:
        adapter = self._host.get(lora_task_id)
        return self._start_load(lora_task_id) if adapter is None else adapter

    def _find_file(self, lora_task_id: int) -> DiskAdapter | None:
        return None if self._disk is None else self._disk.find(lora_task_id)

    def _delete_file(self, lora_task_id: int) -> None:
        if self._disk is not None:
            self._disk.delete(lora_task_id)

    def _start_load(self, lora_task_id: int) -> CachedAdapter:
        file = self._find_file(lora_task_id)
        if file is None or self._disk is None:
            raise AdapterNotFound(lora_task_id)
        victims = self._host.victims_for(lora_task_id, file.num_pages)
        # Before its file can be deleted to make room for the victims' files.
        read = self._disk.open(lora_task_id)
        for victim in victims:
            self._evict(victim)
        adapter = self._host.reserve(lora_task_id, file.digest, file.name, file.ranks, file.num_pages)
        self._load_started[adapter] = time.perf_counter()
        adapter.load = read(self._host.views(adapter))
        return adapter

    def _finish_load(self, adapter: CachedAdapter, disk: DiskTier) -> AdapterNotFound | None:
        """Take up a load that has ended; an error if its file is damaged."""
        started, load = self._load_started.pop(adapter), adapter.load
        assert load is not None
        adapter.load = None
        failure = load.exception()
        error = None
        if failure is None:
            adapter.rows = load.result()
            self._host.count_copy(time.perf_counter() - started)
            self._emit("loaded_from_disk", adapter)
        elif isinstance(failure, DamagedFile | OSError):
            disk.drop_damaged(adapter.lora_task_id, adapter.digest, failure)
            error = AdapterNotFound(adapter.lora_task_id, "its file in lora_cache_dir could not be read")
            if not adapter.is_retired:
                self._host.retire(adapter)
        else:
            raise failure
        if adapter.is_retired and adapter.num_pins == 0:
            self._remove(adapter)
        return error

    def _count_request(self, lora_task_id: int) -> None:
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
            lora_task_id=adapter.lora_task_id,
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

    def _insert(self, lora_task_id: int, packed: PackedAdapter, name: str) -> CachedAdapter:
        for victim in self._host.victims_for(lora_task_id, len(packed.pages)):
            self._evict(victim)
        file = self._find_file(lora_task_id)
        if file is not None and file.digest != packed.digest:
            self._delete_file(lora_task_id)
            self._replacements += 1
            self._emit("replaced", file)
        self._insertions += 1
        return self._host.insert(lora_task_id, packed, name)

    def _replace(self, cached: CachedAdapter, packed: PackedAdapter, name: str) -> CachedAdapter:
        # An unpinned old version is itself room for the new one, even one that an operator pinned.
        is_pinned, cached.is_pinned = cached.is_pinned, False
        try:
            victims = self._host.victims_for(cached.lora_task_id, len(packed.pages))
        except AdapterCacheFull:
            cached.is_pinned = is_pinned
            raise
        for victim in victims:
            if victim is not cached:
                self._evict(victim)
        self._retire(cached)
        self._delete_file(cached.lora_task_id)
        self._replacements += 1
        self._emit("replaced", cached)
        adapter = self._host.insert(cached.lora_task_id, packed, name or cached.name)
        adapter.is_pinned = is_pinned
        return adapter

    def _evict(self, adapter: CachedAdapter) -> None:
        self._device.drop(adapter)
        if self._disk is not None:
            self._spill(adapter, self._disk)
        self._host.evict(adapter)
        self._emit("evicted", adapter)

    def _spill(self, adapter: CachedAdapter, disk: DiskTier) -> Future[float]:
        return disk.store(
            adapter.lora_task_id, adapter.digest, adapter.name, adapter.rows, lambda: self._host.read(adapter)
        )

    def _retire(self, adapter: CachedAdapter) -> None:
        self._host.retire(adapter)
        if adapter.num_pins == 0 and adapter.load is None:
            self._remove(adapter)

    def _remove(self, adapter: CachedAdapter) -> None:
        self._device.drop(adapter)
        self._host.remove(adapter)

    def _count_wait(self, adapter: CachedAdapter, is_usable: bool) -> None:
        if not is_usable:
            self._waiting_since.setdefault(adapter, time.monotonic())
        elif adapter in self._waiting_since:
            self._waits += 1
            self._wait_seconds += time.monotonic() - self._waiting_since.pop(adapter)

    def _emit(self, kind: EventKind, adapter: CachedAdapter | DiskAdapter) -> None:
        self._on_event(AdapterEvent(kind, adapter.lora_task_id, adapter.digest))


def _describe_file(adapter: DiskAdapter) -> AdapterInfo:
    return AdapterInfo(
        lora_task_id=adapter.lora_task_id,
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
