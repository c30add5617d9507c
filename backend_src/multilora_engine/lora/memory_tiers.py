"""`MemoryTiers`: the users of an adapter in host memory and on the device, and its way out of both."""

from __future__ import annotations

import time
from collections.abc import Set

from multilora_engine.lora.adapter_state import CachedAdapter
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.host_tier import HostTier


class MemoryTiers:
    """Counts the users of adapters, and takes adapters out of the host tier and the device tier.

    num_pins: of all adapters, which is the number of requests in flight that have one. num_loans: threads that read
    adapters, which keeps these in host memory as a request does. num_waits, wait_seconds: how
    often and how long the scheduler wanted an adapter that was not usable yet.
    """

    def __init__(self, host: HostTier, device: DeviceTier) -> None:
        self._host = host
        self._device = device
        self._waiting_since: dict[CachedAdapter, float] = {}
        self.num_pins = 0
        self.num_loans = 0
        self.num_waits = 0
        self.wait_seconds = 0.0

    def pin(self, adapter: CachedAdapter) -> None:
        """Keep an adapter in host memory for one request more."""
        self._device.count_request(adapter)
        adapter.state.num_pins += 1
        adapter.num_hits += 1
        adapter.last_used_s = time.time()
        self.num_pins += 1
        self._host.update(adapter)

    def unpin(self, adapter: CachedAdapter) -> None:
        """The counterpart of `pin`."""
        assert adapter.state.num_pins > 0
        adapter.state.num_pins -= 1
        self.num_pins -= 1
        self._end_use(adapter)

    def lend(self, adapter: CachedAdapter) -> None:
        """Keep an adapter in host memory for a thread that reads it."""
        adapter.state.num_pins += 1
        self.num_loans += 1
        self._host.update(adapter)

    def end_loan(self, adapter: CachedAdapter) -> None:
        """The counterpart of `lend`."""
        adapter.state.num_pins -= 1
        self.num_loans -= 1
        self._end_use(adapter)

    def _end_use(self, adapter: CachedAdapter) -> None:
        if adapter.state.num_pins == 0:
            self._waiting_since.pop(adapter, None)
            self._device.forget_failure(adapter)
            self.update(adapter)

    def prefetch(self, adapter: CachedAdapter, wanted: Set[CachedAdapter]) -> None:
        """Start to copy a pinned adapter to the device, if it is in memory and none of `wanted` has to leave for it."""
        assert adapter.state.num_pins > 0
        if adapter.state.is_filled:
            self._device.prefetch(adapter, wanted)

    def acquire(self, adapter: CachedAdapter, wanted: Set[CachedAdapter] = frozenset()) -> bool:
        """Make a pinned adapter usable by the next step, for one sequence more.

        False if the adapter has to wait: its file is still being read, its copy to the device was started by this call
        or is under way, there is no room on the device without evicting one of `wanted`, `max_loras` others are in use,
        or its copy or the write of its row failed, which the next poll tells.
        """
        assert adapter.state.num_pins > 0
        is_usable = (
            adapter.state.is_filled
            and self._device.prefetch(adapter, wanted)
            and self._device.is_ready(adapter)
            and self._device.acquire(adapter)
        )
        self._count_wait(adapter, is_usable)
        return is_usable

    def release(self, adapter: CachedAdapter) -> None:
        """The counterpart of `acquire`."""
        self._device.release(adapter)

    def evict(self, adapter: CachedAdapter) -> None:
        """Free an adapter's pages for the sake of others."""
        self._device.drop(adapter)
        self._host.evict(adapter)

    def update(self, adapter: CachedAdapter) -> None:
        """Some use of an adapter's pages has ended: a retired version goes after its last use."""
        if not adapter.state.is_left_over:
            self._host.update(adapter)
            return
        adapter.arrived.cancel()
        adapter.saved.cancel()
        self._device.drop(adapter)
        self._host.remove(adapter)

    def check_integrity(self) -> None:
        self._host.check_integrity()
        self._device.check_integrity()
        assert self.num_pins + self.num_loans == sum(adapter.state.num_pins for adapter in self._host.adapters)
        assert all(adapter.state.num_pins > 0 for adapter in self._waiting_since)

    def _count_wait(self, adapter: CachedAdapter, is_usable: bool) -> None:
        if not is_usable:
            self._waiting_since.setdefault(adapter, time.monotonic())
        elif adapter in self._waiting_since:
            self.num_waits += 1
            self.wait_seconds += time.monotonic() - self._waiting_since.pop(adapter)
