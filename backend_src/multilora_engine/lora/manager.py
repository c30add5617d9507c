"""`LoRAManager`: put, pin, acquire, release, unpin, unload. The engine's adapters in memory and on disk."""

from __future__ import annotations

from collections.abc import Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import chain, islice
from typing import Literal

import msgspec

from multilora_engine.errors import AdapterNotFound, RequestError
from multilora_engine.lora.adapter_file import DiskAdapter
from multilora_engine.lora.adapter_state import CachedAdapter, Device
from multilora_engine.lora.arrivals import Arrivals, OnConflict
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.disk_traffic import DiskTraffic
from multilora_engine.lora.host_tier import HostTier
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.life_cycle import Level, LoRAStats, OnEvent, Residency, Resident, ignore_event
from multilora_engine.lora.memory_tiers import MemoryTiers
from multilora_engine.lora.names import TaskId, label_of, number_of, tenant_of
from multilora_kernels import LoRATables
from multilora_wire.adapter_info import AdapterInfo, Location, Status
from multilora_wire.layout import AdapterLayout

_STATUS: dict[Device, tuple[Status, Location]] = {
    Device.ABSENT: ("DOWNLOADED", "HOST"),
    Device.FAILED: ("DOWNLOADED", "HOST"),
    Device.COPYING: ("LOADED", "DEVICE"),
    Device.READY: ("READY_FOR_USE", "DEVICE"),
    Device.IN_USE: ("READY_FOR_USE", "DEVICE"),
}


class Inventory:
    """Reads the tiers for operators and gateways."""

    def __init__(self, host: HostTier, device: DeviceTier, traffic: DiskTraffic) -> None:
        self._host = host
        self._device = device
        self._traffic = traffic

    def describe(self) -> list[AdapterInfo]:
        """The current version of every adapter: those on disk alone, then the others, least recently used first."""
        cached = self._host.current
        on_disk = (file for file in self._traffic.files if self._host.get(file.lora_task_id) is None)
        return [*map(_describe_file, on_disk), *map(self._describe, cached)]

    def info(self, lora_task_id: TaskId) -> AdapterInfo:
        """The current version of one adapter, in any tier. Raises AdapterNotFound."""
        known = self._known(lora_task_id)
        if not isinstance(known, CachedAdapter):
            return _describe_file(known)
        module_ids = tuple(sorted({row.module_id for row in known.rows}))
        return msgspec.structs.replace(self._describe(known), module_ids=module_ids)

    def digest(self, lora_task_id: TaskId) -> str:
        """The digest of the current version, in any tier. Raises AdapterNotFound."""
        return self._known(lora_task_id).digest

    def is_known(self, lora_task_id: TaskId) -> bool:
        """Whether an adapter is in some tier."""
        return self._host.get(lora_task_id) is not None or self._traffic.find(lora_task_id) is not None

    def residency(self, max_adapters: int) -> Residency:
        """The adapters in memory; `max_adapters` of them one by one, which costs no look at the others."""
        on_device = (_resident(a, "gpu") for a in self._device.latest if not a.state.is_retired)
        in_memory = (_resident(a, "cpu") for a in self._host.latest if _is_in_host_memory_alone(a))
        return Residency(
            adapters=list(islice(chain(on_device, in_memory), max_adapters)),
            num_on_device=len(self._device),
            num_in_memory=len(self._host),
            max_loras=self._device.max_loras,
            load_seconds=self._host.load_seconds,
            activate_seconds=self._device.copy_seconds,
        )

    def _known(self, lora_task_id: TaskId) -> CachedAdapter | DiskAdapter:
        known = self._host.get(lora_task_id) or self._traffic.find(lora_task_id)
        if known is None:
            raise AdapterNotFound(lora_task_id)
        return known

    def _describe(self, adapter: CachedAdapter) -> AdapterInfo:
        status, location = _STATUS[adapter.state.device]
        return AdapterInfo(
            lora_task_id=number_of(adapter.lora_task_id),
            tenant=tenant_of(adapter.lora_task_id),
            name=adapter.name,
            digest=adapter.digest,
            status=status,
            location=location,
            bytes=self._host.num_bytes(adapter),
            ranks=adapter.ranks,
            num_pins=adapter.state.num_pins,
            is_pinned=adapter.state.is_held,
            last_used_s=adapter.last_used_s,
            num_hits=adapter.num_hits,
            is_dora=adapter.is_dora,
        )


def _is_in_host_memory_alone(adapter: CachedAdapter) -> bool:
    return adapter.state.is_filled and adapter.state.device not in (Device.READY, Device.IN_USE)


def _resident(adapter: CachedAdapter, level: Level) -> Resident:
    label = label_of(adapter.lora_task_id, adapter.name)
    return Resident(label, level, adapter.state.is_held, max(adapter.ranks, default=0))


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
        is_dora=adapter.is_dora,
    )


class LoRAManager:
    """Owns every adapter of the engine; its parts decide: `Arrivals`, `MemoryTiers`, `DiskTraffic`, `Inventory`.

    The life of a request's adapter: `put` when its weights came along, `pin` when the request is accepted, `acquire`
    when it may start to run, `release` when it stops running (finished or preempted), `unpin` when it is finished.
    Nothing pinned is evicted or replaced in place, nothing acquired leaves the device. `hold` keeps an adapter in
    memory whether requests use it or not. `AdapterState` names the states of an adapter meanwhile.

    With a disk tier, every adapter that comes is written there beside the steps, so that it can be evicted at once when
    its place is wanted; `pin` brings it back. Nothing waits for the disk: pages stay taken until they are written, and
    while no others can be had, an adapter waits for its own in the order of arrival. It can be pinned from the start,
    and acquired once `poll` has taken up that it is here. A file and an adapter in host memory that share a task id are
    the same version, always.
    """

    def __init__(
        self,
        host: HostTier,
        device: DeviceTier,
        on_conflict: OnConflict,
        on_event: OnEvent = ignore_event,
        disk: DiskTier | None = None,
    ) -> None:
        self._host = host
        self._device = device
        self._memory = MemoryTiers(host, device)
        self._traffic = DiskTraffic(host, disk, self._memory.update, on_event)
        self._arrivals = Arrivals(device.layout, host, self._memory, self._traffic, on_conflict, on_event)
        self._inventory = Inventory(host, device, self._traffic)

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
    def num_pins(self) -> int:
        """Pins of all adapters: the requests in flight that have one."""
        return self._memory.num_pins

    @property
    def stats(self) -> LoRAStats:
        return LoRAStats(
            device=self._device.stats,
            host=self._host.stats,
            disk=self._traffic.stats,
            insertions=self._arrivals.num_insertions,
            replacements=self._arrivals.num_replacements,
            waits=self._memory.num_waits,
            wait_seconds=self._memory.wait_seconds,
        )

    def describe(self) -> list[AdapterInfo]:
        """The current version of every adapter: those on disk alone, then the others, least recently used first."""
        return self._inventory.describe()

    def residency(self, max_adapters: int) -> Residency:
        """The adapters in memory; `max_adapters` of them one by one, which costs no look at the others."""
        return self._inventory.residency(max_adapters)

    def info(self, lora_task_id: TaskId) -> AdapterInfo:
        """The current version of one adapter, in any tier. Raises AdapterNotFound."""
        return self._inventory.info(lora_task_id)

    def is_known(self, lora_task_id: TaskId) -> bool:
        """Whether an adapter is in some tier."""
        return self._inventory.is_known(lora_task_id)

    def digest(self, lora_task_id: TaskId) -> str:
        """The digest of the current version, in any tier. Raises AdapterNotFound."""
        return self._inventory.digest(lora_task_id)

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
        return self._arrivals.put(lora_task_id, packed, name, origin)

    def has_room(self, packed: PackedAdapter) -> bool:
        """Whether an adapter can be put without the loss of another one."""
        return self._arrivals.has_room(packed)

    def save(self, lora_task_id: TaskId) -> Future[None] | None:
        """Have an adapter in host memory written to the disk tier, where it survives the death of the engine.

        The future is done when it is; it raises OSError if it cannot be written, which every call tries again, and is
        cancelled if the adapter is replaced or unloaded before. None without a disk tier. Raises AdapterNotFound.
        """
        adapter = self._host.get(lora_task_id)
        if adapter is None:
            raise AdapterNotFound(lora_task_id)
        if not self._traffic.has_disk:
            return None
        self._traffic.poll_writes()
        if adapter.state.is_filled:
            self._traffic.save(adapter)
        return adapter.saved

    def pin(self, lora_task_id: TaskId) -> CachedAdapter:
        """Keep the current version of an adapter in the host tier for a request, or have it read from disk into it.

        Raises AdapterNotFound, or AdapterCacheFull if it is on disk and there can be no room to read it.
        """
        if not self._host.count_request(lora_task_id):
            self._traffic.count_request(lora_task_id)
        adapter = self._arrivals.find(lora_task_id)
        self._memory.pin(adapter)
        return adapter

    def unpin(self, adapter: CachedAdapter) -> None:
        """The counterpart of `pin`."""
        self._memory.unpin(adapter)

    def load(self, lora_task_id: TaskId) -> Future[None]:
        """Have an adapter that is on disk read into the host tier. Raises AdapterNotFound, or AdapterCacheFull without
        room.

        The future is done when it is there. It raises RequestError if the file cannot be read, and is cancelled if the
        adapter is replaced or unloaded before.
        """
        return self._arrivals.find(lora_task_id).arrived

    def hold(self, lora_task_id: TaskId) -> Future[None]:
        """Never evict this adapter, nor a version that replaces it, until `end_hold`. One on disk is read.

        The future is that of `load`. Raises AdapterNotFound, or AdapterCacheFull if there is no room to read it, or
        none would be left for another one that waits.
        """
        adapter = self._arrivals.find(lora_task_id)
        self._arrivals.hold(adapter)
        return adapter.arrived

    def end_hold(self, lora_task_id: TaskId) -> None:
        """Let an adapter be evicted again. Raises AdapterNotFound."""
        cached = self._host.get(lora_task_id)
        if cached is not None:
            self._host.hold(cached, False)
        elif not self._inventory.is_known(lora_task_id):
            raise AdapterNotFound(lora_task_id)

    def unload(self, lora_task_id: TaskId) -> None:
        """Forget an adapter, held by an operator or not: new requests do not find it from now on, in any tier.

        Its memory is freed when the requests that use it have finished. Raises AdapterNotFound.
        """
        self._arrivals.unload(lora_task_id)

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that `poll` will have to take up."""
        is_device_busy = self._device.is_copying or self._device.has_failures
        is_admitting = self._host.num_arrivals > 0 or self._arrivals.has_failures
        return is_device_busy or is_admitting or self._traffic.is_busy

    def poll(self) -> dict[CachedAdapter, RequestError]:
        """Take up the copies, reads and writes that have ended, and let in the adapters that wait for room. Does not
        wait.

        Returns the adapters that could not be read from their files, or not be copied to the device. Their requests
        have to unpin them. One whose copy failed, or whose file may be fine, can be pinned again; the others are
        forgotten.
        """
        self._device.poll()
        failed: dict[CachedAdapter, RequestError] = {**self._device.take_failures(), **self._traffic.poll()}
        self._arrivals.admit()
        return failed | self._arrivals.take_failures()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait, in a caller that has nothing else to do, until `poll` has something of the disk to take up, if
        anything is under way there."""
        wait(self._traffic.under_way, timeout_s, FIRST_COMPLETED)

    def settle(self) -> None:
        """Wait, at the start, when no request does, until every adapter has its room."""
        while self._host.num_arrivals:
            self.wait()
            self.poll()

    def close(self) -> None:
        """Save the adapters that the next start should find, the most recently used that fit, and end all threads."""
        self._host.close()
        self._traffic.close(self._host.latest)

    def prefetch(self, adapter: CachedAdapter, wanted: Set[CachedAdapter]) -> None:
        """Start to bring a pinned adapter to the device, if it is in memory and none of `wanted` has to go for it."""
        self._memory.prefetch(adapter, wanted)

    def acquire(self, adapter: CachedAdapter, wanted: Set[CachedAdapter] = frozenset()) -> bool:
        """Make a pinned adapter usable by the next step, for one sequence more.

        False when it has to wait: it is still being read from disk, its copy to the device was started by this call or
        is still under way, there is no room for it on the device (adapters in `wanted` are not evicted for it), or
        `max_loras` others are in use.
        """
        return self._memory.acquire(adapter, wanted)

    def release(self, adapter: CachedAdapter) -> None:
        """The counterpart of `acquire`."""
        self._device.release(adapter)

    def lora_index(self, adapter: CachedAdapter) -> int:
        """The row of an acquired adapter in `tables`."""
        return self._device.lora_index(adapter)

    def check_integrity(self) -> None:
        """All tiers are sound. For tests, after every step."""
        self._memory.check_integrity()
        self._traffic.check_integrity()
        self._arrivals.check_integrity()
