"""`Residency`: the adapters in memory, and the time to bring one there, by which gateways route."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from multilora_engine.histogram import Histogram

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
