"""The records of adapters that leave the engine: events, and the counts of each tier."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from multilora_engine.lora.names import TaskId, number_of, tenant_of
from multilora_wire.adapter_event import AdapterEvent, EventKind


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
        into the tier when they were wanted; or that no source gave.
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
