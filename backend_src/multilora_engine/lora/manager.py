"""`LoRAManager`: put, pin, acquire, release, unpin. The only writer of both tiers."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from multilora_engine.errors import AdapterConflict, AdapterNotFound
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.format import PackedAdapter
from multilora_engine.lora.host_tier import CachedAdapter, HostTier
from multilora_kernels import LoRATables


@dataclass
class LoRAStats:
    """Counts since start. hits and misses: requests whose task id was cached, and was not."""

    hits: int = 0
    misses: int = 0
    insertions: int = 0
    evictions: int = 0
    replacements: int = 0


class LoRAManager:
    """Owns every adapter of the engine.

    The life of a request's adapter: `put` when its weights came along, `pin` when the request is accepted, `acquire`
    when it may start to run, `release` when it stops running (finished or preempted), `unpin` when it is finished.
    Nothing pinned is evicted or replaced in place, nothing acquired leaves the device.
    """

    def __init__(self, host: HostTier, device: DeviceTier, on_conflict: Literal["refuse", "replace"]) -> None:
        self._host = host
        self._device = device
        self._on_conflict = on_conflict
        self.stats = LoRAStats()

    @property
    def tables(self) -> LoRATables:
        return self._device.tables

    @property
    def num_cached(self) -> int:
        """Adapters in the host tier."""
        return len(self._host)

    def put(self, lora_task_id: int, packed: PackedAdapter) -> CachedAdapter:
        """Cache an adapter under a task id. The same content again is only a touch.

        Raises AdapterConflict (other content, `lora_on_conflict` is `refuse`) or AdapterCacheFull; the cache is then
        as it was.
        """
        cached = self._host.get(lora_task_id)
        if cached is None:
            return self._insert(lora_task_id, packed)
        if cached.digest == packed.digest:
            return cached
        if self._on_conflict == "refuse":
            raise AdapterConflict(lora_task_id, cached.digest, packed.digest)
        return self._replace(cached, packed)

    def digest(self, lora_task_id: int) -> str:
        """The digest of the current version. Raises AdapterNotFound."""
        return self._find(lora_task_id).digest

    def pin(self, lora_task_id: int) -> CachedAdapter:
        """Hold the current version of an adapter in the host tier. Raises AdapterNotFound."""
        adapter = self._find(lora_task_id)
        adapter.num_pins += 1
        return adapter

    def unpin(self, adapter: CachedAdapter) -> None:
        assert adapter.num_pins > 0
        adapter.num_pins -= 1
        if adapter.is_retired and adapter.num_pins == 0:
            self._remove(adapter)

    def acquire(self, adapter: CachedAdapter, wanted: Set[CachedAdapter] = frozenset()) -> bool:
        """Make a pinned adapter usable by the next step, for one sequence more.

        False when it has to wait: its copy to the device was started by this call or is still under way, there is no
        room for it on the device (adapters in `wanted` are not evicted for it), or `max_loras` others are in use.
        """
        assert adapter.num_pins > 0
        return (
            self._device.prefetch(adapter, wanted) and self._device.is_ready(adapter) and self._device.acquire(adapter)
        )

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
            self.stats.misses += 1
            raise AdapterNotFound(lora_task_id)
        self.stats.hits += 1
        return adapter

    def _insert(self, lora_task_id: int, packed: PackedAdapter) -> CachedAdapter:
        for victim in self._host.victims_for(lora_task_id, len(packed.pages)):
            self._remove(victim)
            self.stats.evictions += 1
        self.stats.insertions += 1
        return self._host.insert(lora_task_id, packed)

    def _replace(self, cached: CachedAdapter, packed: PackedAdapter) -> CachedAdapter:
        # An unpinned old version is itself evictable, so it counts as room for the new one.
        victims = self._host.victims_for(cached.lora_task_id, len(packed.pages))
        for victim in victims:
            self._remove(victim)
        if cached not in victims:
            self._host.retire(cached)
            if cached.num_pins == 0:
                self._remove(cached)
        self.stats.replacements += 1
        return self._host.insert(cached.lora_task_id, packed)

    def _remove(self, adapter: CachedAdapter) -> None:
        self._device.drop(adapter)
        self._host.remove(adapter)
