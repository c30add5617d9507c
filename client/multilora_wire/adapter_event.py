"""`AdapterEvent`: one line of a server's log of its adapters."""

from __future__ import annotations

from typing import Literal

import msgspec

EventKind = Literal[
    "uploaded",
    "downloaded",
    "combined",
    "evicted",
    "loaded_to_device",
    "unloaded_from_device",
    "replaced",
    "unloaded",
    "spilled_to_disk",
    "deleted_from_disk",
    "loaded_from_disk",
    "fetch_failed",
]


class AdapterEvent(msgspec.Struct, frozen=True, gc=False):
    """Something happened to one version of an adapter.

    digest: of this version's content, empty where there was none. time_ns: nanoseconds since the epoch.
    instance: the engine process, as `host:process id`; another one after every restart.
    tenant: the owner of the adapter, empty if it belongs to none.
    """

    kind: EventKind
    lora_task_id: int
    digest: str
    time_ns: int
    instance: str
    tenant: str = ""
