"""`Inventory`: the adapters of all tiers as operators and gateways see them. It changes nothing."""

from __future__ import annotations

from itertools import chain, islice

import msgspec

from multilora_engine.errors import AdapterNotFound
from multilora_engine.lora.adapter_file import DiskAdapter
from multilora_engine.lora.adapter_state import CachedAdapter, Device
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.disk_traffic import DiskTraffic
from multilora_engine.lora.host_tier import HostTier
from multilora_engine.lora.life_cycle import Level, Residency, Resident
from multilora_engine.lora.names import TaskId, label_of, number_of, tenant_of
from multilora_wire.adapter_info import AdapterInfo, Location, Status
from multilora_wire.adapter_use import parse_use

_STATUS: dict[Device, tuple[Status, Location]] = {
    Device.ABSENT: ("DOWNLOADED", "HOST"),
    Device.FAILED: ("DOWNLOADED", "HOST"),
    Device.COPYING: ("LOADED", "DEVICE"),
    Device.READY: ("READY_FOR_USE", "DEVICE"),
    Device.IN_USE: ("READY_FOR_USE", "DEVICE"),
}


class Inventory:
    """Describes the adapters of all tiers."""

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
        module_ids = () if known.entries is None else known.entries.module_ids
        return msgspec.structs.replace(self._describe(known), module_ids=module_ids)

    def is_known(self, lora_task_id: TaskId) -> bool:
        """Whether any tier has an adapter."""
        return self._host.get(lora_task_id) is not None or self._traffic.find(lora_task_id) is not None

    def digest(self, lora_task_id: TaskId) -> str:
        """The digest of the current version of an adapter, empty if no tier has it."""
        known = self._host.get(lora_task_id) or self._traffic.find(lora_task_id)
        return "" if known is None else known.digest

    def residency(self, max_adapters: int) -> Residency:
        """Counts of the adapters in memory, and at most `max_adapters` of them one by one.

        Looks only at those adapters.
        """
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
            is_dora="DoRA" in adapter.kinds,
            kinds=adapter.kinds,
            members=adapter.traits.members,
            use=parse_use(adapter.traits.use).describe(),
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
        is_dora="DoRA" in adapter.kinds,
        kinds=adapter.kinds,
        members=adapter.traits.members,
        use=parse_use(adapter.traits.use).describe(),
    )
