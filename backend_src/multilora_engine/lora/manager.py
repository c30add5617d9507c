"""`LoRAManager`: put, pin, acquire, release, unpin, unload. The only writer of both tiers."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Literal

from multilora_engine.errors import AdapterCacheFull, AdapterConflict, AdapterNotFound
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.format import PackedAdapter
from multilora_engine.lora.host_tier import CachedAdapter, HostTier
from multilora_engine.lora.life_cycle import (
    AdapterEvent,
    AdapterInfo,
    EventKind,
    LoRAStats,
    OnEvent,
    ignore_event,
)
from multilora_kernels import LoRATables


class LoRAManager:
    """Owns every adapter of the engine.

    The life of a request's adapter: `put` when its weights came along, `pin` when the request is accepted, `acquire`
    when it may start to run, `release` when it stops running (finished or preempted), `unpin` when it is finished.
    Nothing pinned is evicted or replaced in place, nothing acquired leaves the device.
    """

    def __init__(
        self,
        host: HostTier,
        device: DeviceTier,
        on_conflict: Literal["refuse", "replace"],
        on_event: OnEvent = ignore_event,
    ) -> None:
        self._host = host
        self._device = device
        self._on_conflict = on_conflict
        self._on_event = on_event
        self._hits = 0
        self._misses = 0
        self._insertions = 0
        self._replacements = 0
        self._waits = 0
        self._wait_seconds = 0.0
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
            insertions=self._insertions,
            replacements=self._replacements,
            waits=self._waits,
            wait_seconds=self._wait_seconds,
        )

    def describe(self) -> list[AdapterInfo]:
        """The current version of every adapter, least recently used first."""
        return [self._describe(adapter) for adapter in self._host.current]

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
        if cached is not None and cached.digest == packed.digest:
            cached.name = name or cached.name
            return cached
        if cached is not None and self._on_conflict == "refuse":
            raise AdapterConflict(lora_task_id, cached.digest, packed.digest)
        adapter = self._insert(lora_task_id, packed, name) if cached is None else self._replace(cached, packed, name)
        self._emit(origin, adapter)
        return adapter

    def digest(self, lora_task_id: int) -> str:
        """The digest of the current version. Raises AdapterNotFound."""
        return self._find(lora_task_id).digest

    def pin(self, lora_task_id: int) -> CachedAdapter:
        """Hold the current version of an adapter in the host tier for a request. Raises AdapterNotFound."""
        try:
            adapter = self._find(lora_task_id)
        except AdapterNotFound:
            self._misses += 1
            raise
        self._hits += 1
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
            if adapter.is_retired:
                self._remove(adapter)

    def pin_adapter(self, lora_task_id: int) -> None:
        """Never evict this adapter, nor a version that replaces it, until `unpin_adapter`. Raises AdapterNotFound."""
        self._find(lora_task_id).is_pinned = True

    def unpin_adapter(self, lora_task_id: int) -> None:
        """Let an adapter be evicted again. Raises AdapterNotFound."""
        self._find(lora_task_id).is_pinned = False

    def unload(self, lora_task_id: int) -> None:
        """Forget an adapter, pinned by an operator or not: new requests do not find it from now on.

        Its memory is freed when the requests that use it have finished. Raises AdapterNotFound.
        """
        adapter = self._find(lora_task_id)
        self._retire(adapter)
        self._emit("unloaded", adapter)

    def acquire(self, adapter: CachedAdapter, wanted: Set[CachedAdapter] = frozenset()) -> bool:
        """Make a pinned adapter usable by the next step, for one sequence more.

        False when it has to wait: its copy to the device was started by this call or is still under way, there is no
        room for it on the device (adapters in `wanted` are not evicted for it), or `max_loras` others are in use.
        """
        assert adapter.num_pins > 0
        is_usable = (
            self._device.prefetch(adapter, wanted) and self._device.is_ready(adapter) and self._device.acquire(adapter)
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
        """Both tiers are sound. For tests, after every step."""
        self._host.check_integrity()
        self._device.check_integrity()

    @property
    def num_pins(self) -> int:
        """Pins of all adapters: the requests in flight that have one."""
        return sum(adapter.num_pins for adapter in self._host.adapters)

    def _find(self, lora_task_id: int) -> CachedAdapter:
        adapter = self._host.get(lora_task_id)
        if adapter is None:
            raise AdapterNotFound(lora_task_id)
        return adapter

    def _describe(self, adapter: CachedAdapter) -> AdapterInfo:
        is_on_device = adapter in self._device
        is_ready = self._device.is_ready(adapter)
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
        self._replacements += 1
        self._emit("replaced", cached)
        adapter = self._host.insert(cached.lora_task_id, packed, name or cached.name)
        adapter.is_pinned = is_pinned
        return adapter

    def _evict(self, adapter: CachedAdapter) -> None:
        self._device.drop(adapter)
        self._host.evict(adapter)
        self._emit("evicted", adapter)

    def _retire(self, adapter: CachedAdapter) -> None:
        self._host.retire(adapter)
        if adapter.num_pins == 0:
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

    def _emit(self, kind: EventKind, adapter: CachedAdapter) -> None:
        self._on_event(AdapterEvent(kind, adapter.lora_task_id, adapter.digest))
