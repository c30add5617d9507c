"""`CachedAdapter`: one version of one adapter in memory."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from multilora_engine.lora.adapter_state import AdapterState, File
from multilora_engine.lora.layout import PackedRow
from multilora_engine.lora.names import TaskId
from multilora_wire.layout import PageShape


@dataclass(eq=False)
class CachedAdapter:
    """One version of one adapter in the host tier. Compared by identity: two versions of an id are two adapters.

    ranks: the different ranks of its rows, ascending. is_dora: whether any of them is DoRA. state: of its life cycle.
    name: its source's name for it, if any.
    shape: of the pages it needs; `pages` and `rows` are empty until it has them, and until they are filled.
    arrived: done when its pages are filled; raises RequestError if its file could not be read, cancelled if the adapter
        went before.
    saved: done when its file is written; raises OSError if that failed last, cancelled if the file is not wanted any
        more.
    last_used_s: seconds since the epoch of the last pin, at first of the insertion. num_hits: pins so far.
    """

    lora_task_id: TaskId
    digest: str
    ranks: tuple[int, ...]
    shape: PageShape
    name: str = ""
    state: AdapterState = field(default_factory=AdapterState)
    rows: list[PackedRow] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    arrived: Future[None] = field(default_factory=Future)
    saved: Future[None] = field(default_factory=Future)
    last_used_s: float = field(default_factory=time.time)
    num_hits: int = 0
    is_dora: bool = False

    def __post_init__(self) -> None:
        if self.state.file is File.WRITTEN:
            self.saved.set_result(None)

    @property
    def num_pages(self) -> int:
        return self.shape.num_pages
