"""`ServedEngine`: the part of an engine that its server uses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from multilora_engine.engine.block_events import BlockEvents
from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats
from multilora_engine.engine_info import EngineInfo
from multilora_engine.lora.adapter_events import AdapterEvents
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.names import TaskId
from multilora_engine.lora.remote import RemoteAdapters
from multilora_engine.process.adapter_operator import ManagedAdapters
from multilora_engine.request import GenerationRequest, TokenOutput


class ServedAdapters(ManagedAdapters, Protocol):
    """The part of `multilora_engine.lora.manager.LoRAManager` that the server and its operator use."""

    def save(self, lora_task_id: TaskId) -> Future[None] | None: ...


class ServedEngine(Protocol):
    """The part of `multilora_engine.engine.engine.Engine` that the server uses."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def loras(self) -> ServedAdapters: ...
    @property
    def remote(self) -> RemoteAdapters: ...
    @property
    def lora_events(self) -> AdapterEvents: ...
    @property
    def block_events(self) -> BlockEvents: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def adapters_in_use(self) -> AdaptersInUse: ...
    def put_adapter(self, lora_task_id: TaskId, adapter: PackedAdapter, name: str = "") -> None: ...
    def add_request(self, request: GenerationRequest) -> None: ...
    def abort(self, request_id: str) -> TokenOutput | None: ...
    def step(self, on_progress: Callable[[], None]) -> list[TokenOutput]: ...
    def note_sent(self) -> None: ...
    def close(self) -> None: ...
