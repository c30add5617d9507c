"""`DiskTraffic`: the reads and writes between host memory and the disk tier, if there is one, and adapters made of
others, which come beside the steps as well."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from multilora_engine.errors import AdapterNotFound, AdapterNotLoaded, RequestError
from multilora_engine.lora.adapter_file import DamagedFile, DiskAdapter
from multilora_engine.lora.adapter_state import CachedAdapter, File, Memory
from multilora_engine.lora.disk_tier import DiskTier, OpenFile
from multilora_engine.lora.host_tier import HostTier, PlannedAdapter
from multilora_engine.lora.layout import PackedRow, TableEntries
from multilora_engine.lora.life_cycle import OnEvent, TierStats, adapter_event
from multilora_engine.lora.names import TaskId
from multilora_wire.layout import AdapterLayout

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of reading a file that say nothing about the file."""


@dataclass(frozen=True)
class _Read:
    """A file that is being read into an adapter's pages. started: by `time.perf_counter`."""

    rows: Future[list[PackedRow]]
    started: float


@dataclass(frozen=True)
class _Making:
    """A planned adapter that is being made in its pages. started: by `time.perf_counter`."""

    plan: PlannedAdapter
    future: Future[None]
    started: float


class DiskTraffic:
    """Writes the states of adapters' files. Without a disk tier there are no files, and nothing happens here."""

    def __init__(
        self,
        host: HostTier,
        layout: AdapterLayout,
        disk: DiskTier | None,
        on_end: Callable[[CachedAdapter], None],
        on_event: OnEvent,
    ) -> None:
        """on_end: hears of each adapter whose pages have been read or written to their end."""
        self._host = host
        self._layout = layout
        self._disk = disk
        self._on_end = on_end
        self._on_event = on_event
        self._reads: dict[CachedAdapter, _Read] = {}
        self._ended: deque[tuple[CachedAdapter, TableEntries | None]] = deque()
        self._makings: dict[CachedAdapter, _Making] = {}
        self._made: deque[CachedAdapter] = deque()
        self._may_have_refused = False
        self._is_closing = False

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    @property
    def stats(self) -> TierStats:
        return TierStats() if self._disk is None else self._disk.stats

    @property
    def files(self) -> list[DiskAdapter]:
        """All adapters that have files, least recently used first."""
        return [] if self._disk is None else self._disk.adapters

    @property
    def under_way(self) -> list[Future[Any]]:
        """The reads and writes whose ends `poll` will take up."""
        writes = [] if self._disk is None else self._disk.writes
        makings = (making.future for making in self._makings.values())
        return [*writes, *(read.rows for read in self._reads.values()), *makings]

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._reads or self._makings) or (self._disk is not None and self._disk.is_writing)

    def find(self, lora_task_id: TaskId) -> DiskAdapter | None:
        """The description of an adapter's file, if it has one."""
        return None if self._disk is None else self._disk.find(lora_task_id)

    def file_state(self, lora_task_id: TaskId) -> File:
        """The state in which the file of a new version begins, others being deleted."""
        if self._disk is None:
            return File.REFUSED
        return File.NONE if self._disk.find(lora_task_id) is None else File.WRITTEN

    def count_request(self, lora_task_id: TaskId) -> None:
        """A request did not find its adapter in host memory."""
        if self._disk is not None:
            self._disk.count_request(lora_task_id)

    def touch(self, adapter: CachedAdapter) -> None:
        """Make an adapter's file the most recently used, if it has one."""
        if self._disk is not None and adapter.state.file is File.WRITTEN:
            self._disk.touch(adapter.lora_task_id)

    def delete(self, lora_task_id: TaskId) -> Future[None] | None:
        """Delete an adapter's file, written or being written, if it has one. Returns as `DiskTier.delete` does."""
        if self._disk is None:
            return None
        deleted = self._disk.delete(lora_task_id)
        self._note_deleted(lora_task_id)
        return deleted

    def save(self, adapter: CachedAdapter) -> None:
        """Have the file of an adapter in memory written, unless it has one, or one is being written."""
        if self._disk is None or adapter.state.file in (File.WRITTEN, File.WRITING):
            return
        if adapter.saved.done():
            adapter.saved = Future()
        adapter.state.move(File.WRITING)
        self._host.update(adapter)
        write = self._disk.store(
            adapter.lora_task_id,
            adapter.digest,
            adapter.name,
            adapter.rows,
            self._host.views(adapter),
            partial(self._end_write, adapter),
            self._note_deleted,
            adapter.traits,
        )
        write.add_done_callback(partial(_tell_saved, adapter.saved))

    def open(self, file: DiskAdapter) -> OpenFile:
        """An adapter's file, which can be read even if it is deleted to make room for others."""
        assert self._disk is not None
        return self._disk.open(file.lora_task_id)

    def read(self, adapter: CachedAdapter, file: OpenFile) -> None:
        """Start to read a file into an adapter's pages."""
        adapter.state.move(Memory.READING)
        rows = file.read(self._host.views(adapter))
        self._reads[adapter] = _Read(rows, time.perf_counter())
        rows.add_done_callback(partial(self._note_read, adapter))

    def make(self, adapter: CachedAdapter, plan: PlannedAdapter) -> None:
        """Start to make an adapter in its pages."""
        adapter.state.move(Memory.READING)
        future = plan.begin(self._host.views(adapter))
        self._makings[adapter] = _Making(plan, future, time.perf_counter())
        future.add_done_callback(lambda _: self._made.append(adapter))

    def poll(self) -> dict[CachedAdapter, RequestError]:
        """Take up the reads and writes that have ended; the adapters that could not be read or made."""
        failed: dict[CachedAdapter, RequestError] = {}
        while self._made:
            adapter = self._made.popleft()
            refused = self._end_making(adapter)
            if refused is not None:
                failed[adapter] = refused
        if self._disk is None:
            return failed
        self._disk.poll()
        while self._ended:
            adapter, entries = self._ended.popleft()
            adapter.entries = entries
            error = self._end_read(adapter, self._disk)
            if error is not None:
                failed[adapter] = error
        return failed

    def poll_writes(self) -> None:
        """Take up the writes that have ended."""
        if self._disk is not None:
            self._disk.poll()

    def close(self, adapters: Iterable[CachedAdapter]) -> None:
        """Save as many of these adapters as fit, the first ones first, and end the threads."""
        if self._disk is None:
            return
        room, chosen = self._disk.num_bytes, []
        for adapter in adapters:
            room -= self._host.num_bytes(adapter)
            if room > 0 and adapter.state.is_filled:
                chosen.append(adapter)
        for adapter in reversed(chosen):
            self.save(adapter)
        self._is_closing = True
        self._disk.close()

    def check_integrity(self) -> None:
        reading = {adapter for adapter in self._host.adapters if adapter.state.memory is Memory.READING}
        assert self._reads.keys() | self._makings.keys() == reading
        if self._disk is None:
            assert all(adapter.state.file is File.REFUSED for adapter in self._host.adapters)
            return
        self._disk.check_integrity()
        files = {file.lora_task_id: file.digest for file in self._disk.adapters}
        for adapter in self._host.current:
            assert files.get(adapter.lora_task_id, adapter.digest) == adapter.digest, "a file of an old version"
            assert (adapter.state.file is File.WRITTEN) == (adapter.lora_task_id in files)
            is_under_way = adapter.state.file is File.WRITING or not adapter.state.is_filled
            assert adapter.saved.done() or is_under_way, "nobody will hear of it"

    def _note_read(self, adapter: CachedAdapter, rows: Future[list[PackedRow]]) -> None:
        """On the thread that has read the file, which makes the entries: the engine's has no time for them."""
        entries = None if rows.exception() else TableEntries.of(rows.result(), self._layout)
        self._ended.append((adapter, entries))

    def _note_deleted(self, lora_task_id: TaskId) -> None:
        """The disk tier has deleted the file of a task id, written or being written."""
        adapter = self._host.get(lora_task_id)
        if adapter is not None and adapter.state.file is File.WRITTEN:
            adapter.state.move(File.NONE)
            self._host.update(adapter)

    def _end_write(self, adapter: CachedAdapter, file: File) -> None:
        adapter.state.move(file)
        self._on_end(adapter)
        if file is File.REFUSED:
            self._may_have_refused = True
        elif file is File.WRITTEN and self._may_have_refused and not self._is_closing:
            self._try_again()

    def _try_again(self) -> None:
        """The disk takes files again: have that one written whose adapter was used last, of those that it refused."""
        states = ((adapter, adapter.state) for adapter in self._host.latest if self._fits(adapter))
        refused = next((adapter for adapter, s in states if s.is_filled and s.file is File.REFUSED), None)
        self._may_have_refused = refused is not None
        if refused is not None:
            self.save(refused)

    def _fits(self, adapter: CachedAdapter) -> bool:
        return self._disk is not None and self._host.num_bytes(adapter) < self._disk.num_bytes

    def _end_read(self, adapter: CachedAdapter, disk: DiskTier) -> RequestError | None:
        """Take up a read that has ended; an error if the file could not be read."""
        read = self._reads.pop(adapter)
        failure = read.rows.exception()
        error: RequestError | None = None
        if failure is None:
            self._host.note_read(adapter, read.rows.result(), time.perf_counter() - read.started)
            self._on_event(adapter_event("loaded_from_disk", adapter.lora_task_id, adapter.digest))
        elif isinstance(failure, DamagedFile | OSError):
            error = self._lose(adapter, failure, disk)
        else:
            raise failure
        self._on_end(adapter)
        return error

    def _end_making(self, adapter: CachedAdapter) -> RequestError | None:
        """Take up an adapter that is made; an error if it cannot be."""
        making = self._makings.pop(adapter)
        making.plan.end()
        error = making.future.exception()
        if error is None:
            self._host.note_filled(adapter, making.plan.rows, time.perf_counter() - making.started)
            if not adapter.state.is_retired:
                self.save(adapter)
        elif isinstance(error, RequestError):
            adapter.state.move(Memory.LOST)
            adapter.arrived.set_exception(error)
            if not adapter.state.is_retired:
                self._host.retire(adapter)
        else:
            raise error
        self._on_end(adapter)
        return error

    def _lose(self, adapter: CachedAdapter, failure: DamagedFile | OSError, disk: DiskTier) -> RequestError:
        adapter.state.move(Memory.LOST)
        error = self._note_unreadable(adapter, failure, disk)
        adapter.arrived.set_exception(error)
        if not adapter.state.is_retired:
            self._host.retire(adapter)
        return error

    def _note_unreadable(self, adapter: CachedAdapter, failure: DamagedFile | OSError, disk: DiskTier) -> RequestError:
        if isinstance(failure, OSError) and failure.errno in _SHORTAGES:
            disk.note_unread(adapter.lora_task_id, failure)
            return AdapterNotLoaded(adapter.lora_task_id, f"reading its file failed: {failure.strerror}")
        disk.drop_damaged(adapter.lora_task_id, adapter.digest, failure)
        if disk.find(adapter.lora_task_id) is None:
            self._note_deleted(adapter.lora_task_id)
        return AdapterNotFound(adapter.lora_task_id, "its file in lora_cache_dir could not be read")


def _tell_saved(saved: Future[None], write: Future[float]) -> None:
    """Called on the disk tier's thread when a write has ended, or where it is cancelled."""
    with suppress(InvalidStateError):  # saved before, or not wanted any more
        if write.cancelled():
            saved.cancel()
        elif (error := write.exception()) is not None:
            saved.set_exception(error)
        else:
            saved.set_result(None)
