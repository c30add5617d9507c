"""The records of adapters that leave the engine: events, and the counts of each tier."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import msgspec

from multilora_engine.histogram import Histogram
from multilora_engine.lora.names import TaskId, number_of, tenant_of
from multilora_wire.adapter_event import AdapterEvent, EventKind

Level = Literal["gpu", "cpu"]
"""gpu: on the device, be it a CPU, where a step can use it at once. cpu: in host memory alone."""


class Resident(msgspec.Struct, frozen=True, gc=False):
    """One adapter in memory. name: or its task id as text. is_pinned: an operator keeps it. rank: of its widest row."""

    name: str
    level: Level
    is_pinned: bool
    rank: int


@dataclass(frozen=True)
class Residency:
    """One moment.

    adapters: so many of them as were asked for: those on the device first, of each level the latest used first.
    num_on_device, num_in_memory: all adapters on the device, and all in host memory, which has those of the device too.
    max_loras: distinct adapters that one step can use. More than that may be on the device.
    load_seconds: times from a file or a source into host memory. activate_seconds: from there to the device.
    """

    adapters: list[Resident] = field(default_factory=list)
    num_on_device: int = 0
    num_in_memory: int = 0
    max_loras: int = 0
    load_seconds: Histogram = field(default_factory=Histogram)
    activate_seconds: Histogram = field(default_factory=Histogram)


@cache
def instance_name() -> str:
    """The name of this engine process, `host:process id`: another one after every restart."""
    return f"{socket.gethostname()}:{os.getpid()}"


def adapter_event(kind: EventKind, task_id: TaskId, digest: str) -> AdapterEvent:
    """An event of this moment in this process."""
    return AdapterEvent(kind, number_of(task_id), digest, time.time_ns(), instance_name(), tenant_of(task_id))


OnEvent = Callable[[AdapterEvent], None]
"""Hears of every event, on the thread that owns the manager; must return quickly."""


def ignore_event(event: AdapterEvent) -> None:
    """An `OnEvent` that does nothing."""


@dataclass(frozen=True)
class TierStats:
    """One tier. Bytes and adapters are of this moment, the rest counts since start.

    hits, misses: requests that found their adapter here, and that did not and had to go on to the next tier.
    copies, copy_seconds: adapters that were copied into the tier, and how long that took.
    failures: adapters that were lost because a file could not be written, or was damaged; that could not be copied
        into the tier, or used there, when they were wanted; or that no source gave.
    """

    bytes_used: int = 0
    bytes_total: int = 0
    num_adapters: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    copies: int = 0
    copy_seconds: float = 0.0
    failures: int = 0


@dataclass(frozen=True)
class LoRAStats:
    """The counts of all tiers; `remote` is of the adapters that sources gave.

    waits, wait_seconds: times an adapter was wanted by the scheduler but not usable yet, until it was.
    """

    device: TierStats
    host: TierStats
    disk: TierStats
    insertions: int
    replacements: int
    waits: int
    wait_seconds: float
    remote: TierStats = TierStats()
