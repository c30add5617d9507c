"""The engine's answers to operations.py.

In a module of its own, so that a front that reads them need not import the tiers (seconds and tens of MB).
"""

from __future__ import annotations

import msgspec

from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats, WeightInfo, WeightStats
from multilora_engine.lora.life_cycle import LoRAStats, Residency
from multilora_engine.process.telemetry import RequestStats
from multilora_engine.process.usage import Usage
from multilora_wire.adapter_event import AdapterEvent
from multilora_wire.adapter_info import AdapterInfo
from multilora_wire.layout import AdapterLayout


class AdapterList(msgspec.Struct, frozen=True):
    """The answer to `list`, by task id."""

    adapters: list[AdapterInfo]


class AdapterReport(msgspec.Struct, frozen=True):
    """The answer to `load`, `pin` and `unpin`.

    Also to `unload`, as the adapter was: its pins are the requests that go on.
    """

    adapter: AdapterInfo


class EventList(msgspec.Struct, frozen=True):
    """The answer to `events`; see `NumberedEvents`."""

    events: list[AdapterEvent]
    last: int
    num_missed: int


class LoadReport(msgspec.Struct, frozen=True):
    """The load of the engine, and its work so far, over all adapters."""

    engine: EngineStats
    adapters: AdaptersInUse
    requests: RequestStats


class StatsReport(msgspec.Struct, frozen=True):
    """The answer to `stats`. usage: of the adapters most asked for, by their labels; other_usage: of all the others.

    clients, other_clients: likewise, of the tenants or clients that asked, as far as the server knows them.
    """

    tiers: LoRAStats
    usage: dict[str, Usage]
    other_usage: Usage
    load: LoadReport
    residency: Residency = msgspec.field(default_factory=Residency)
    clients: dict[str, Usage] = {}
    other_clients: Usage = msgspec.field(default_factory=Usage)


class LayoutReport(msgspec.Struct, frozen=True):
    """The answer to `layout`."""

    layout: AdapterLayout


class ModelReport(msgspec.Struct, frozen=True):
    """The answer to `describe`. model: the name of its checkpoint's directory. version: of the engine."""

    model: str
    max_model_len: int
    vocab_size: int
    version: str


class WeightList(msgspec.Struct, frozen=True):
    """The answer to `weights`: the weights that the operation named, as they are now. stats: of all weights."""

    weights: list[WeightInfo]
    stats: WeightStats


Report = AdapterList | AdapterReport | EventList | StatsReport | LayoutReport | ModelReport | WeightList
