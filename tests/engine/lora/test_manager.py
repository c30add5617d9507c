"""Both adapter tiers under random use, against a model so simple that it cannot be wrong."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import seed as with_seed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.adapters import ENCODER_DECODER, TINY, WireAdapter, wire_adapter

from multilora_engine.errors import AdapterCacheFull, AdapterConflict, AdapterNotFound, AdapterNotLoaded
from multilora_engine.lora import device_tier
from multilora_engine.lora.adapter_file import write_file_atomically
from multilora_engine.lora.adapter_state import TRANSITIONS, AdapterState, CachedAdapter, Memory, State
from multilora_engine.lora.device_tier import DeviceTier, TableRows
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.free_pages import PagePool
from multilora_engine.lora.host_tier import HostTier, copy_pages, move_pages
from multilora_engine.lora.layout import PackedAdapter, TableEntries
from multilora_engine.lora.life_cycle import OnEvent, ignore_event
from multilora_engine.lora.manager import LoRAManager, Origin
from multilora_engine.lora.names import TaskId, TenantTaskId, label_of, scoped_task_id
from multilora_engine.lora.page_copies import CopyPages, PageCopy, copy_at_once
from multilora_wire.adapter_event import AdapterEvent
from multilora_wire.adapter_info import AdapterInfo
from multilora_wire.layout import AdapterLayout, PageShape

MAX_LORAS = 3
TASK_IDS: list[TaskId] = [0, 1, 2, TenantTaskId("acme", 0), TenantTaskId("bolt", 0)]
TASKS = st.sampled_from(TASK_IDS)
"""Two tenants use the number that an adapter of no tenant has, too."""
"""Few, so that what is asked for is often there."""


def _adapter(content: int) -> tuple[WireAdapter, PackedAdapter]:
    """Content `c` takes 1 to 3 pages and has its own numbers in it."""
    ranks = {0: [1], 1: [16, 16, 16], 2: [16] * 6, 3: [16] * 7}[content % 4]
    rows = [((1, 2, 3, 4, 5, 6, 7)[i], content % 3, rank) for i, rank in enumerate(ranks)]
    wire = wire_adapter(TINY, rows, seed=content)
    return wire, pack_adapter(wire.weights, wire.config, TINY)


def _spanning_adapter(content: int) -> tuple[WireAdapter, PackedAdapter]:
    """In pages of 1024 bytes: one page, or five or six pages of which several have to be in a row."""
    row = [(1, content % 3, 1), (1, content % 3, 1), (4, content % 3, 16), (6, content % 3, 16)][content % 4]
    wire = wire_adapter(TINY, [row], seed=content)
    return wire, pack_adapter(wire.weights, wire.config, replace(TINY, page_bytes=1024))


CONTENTS = [_adapter(content) for content in range(12)]
SPANNING_CONTENTS = [_spanning_adapter(content) for content in range(12)]
LARGE = 3
"""A spanning content with runs of four and two pages."""


def build_manager(
    num_host_pages: int,
    num_device_pages: int | None,
    on_conflict: str,
    on_event: OnEvent = ignore_event,
    disk: DiskTier | None = None,
    copy_pages: CopyPages | None = None,
    layout: AdapterLayout = TINY,
    max_loras: int = MAX_LORAS,
    is_device_dead: Callable[[], bool] = lambda: False,
) -> LoRAManager:
    host = HostTier(num_host_pages, layout.page_bytes)
    host.pool.storage.fill_(0xFF)  # NaN in every dtype: what is read must have been written
    device_pool = host.pool
    if num_device_pages is not None:
        device_pool = PagePool(num_device_pages, layout.page_bytes, torch.device("cpu"))
        device_pool.storage.fill_(0xFF)
    device = DeviceTier(layout, host.pool, device_pool, max_loras, on_event, copy_pages, is_device_dead)
    return LoRAManager(host, device, on_conflict, on_event, disk)  # type: ignore[arg-type]


def assert_tables_hold(manager: LoRAManager, adapter: CachedAdapter, wire: WireAdapter) -> None:
    """The tables' row of an acquired adapter addresses exactly its own matrices, and nothing else."""
    index, tables = manager.device.lora_index(adapter), manager.device.tables
    expected_columns = set()
    sites = manager.device.layout.sites
    for (module_id, layer), (a, b) in wire.matrices.items():
        for part in sites.module_at[layer, module_id].parts:
            column, start, end = part.column, part.start, part.start + sites.site_at[part.column].out_size
            expected_columns.add(column)
            rank = int(tables.rank[index, column])
            assert rank == a.shape[0]
            a_offset, b_offset = int(tables.a_offset[index, column]), int(tables.b_offset[index, column])
            assert torch.equal(tables.arena[a_offset : a_offset + a.numel()].view_as(a), a)
            part = b[start:end]
            assert torch.equal(tables.arena[b_offset : b_offset + part.numel()].view_as(part), part)
    assert set(torch.nonzero(tables.rank[index]).flatten().tolist()) == expected_columns


class _SteppedCopy:
    def __init__(self, device: SteppedCopies, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._pages = list(zip(sources, targets, strict=True))
        self._is_done = False
        self._error: RuntimeError | None = None

    def run(self, error: RuntimeError | None) -> None:
        """Copy all pages, or all but one and then fail, unless that has happened."""
        if self._is_done:
            return
        for source, target in self._pages[1 if error else 0 :]:
            target.copy_(source)
        self._is_done, self._error = True, error

    def is_done(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._is_done

    def wait(self) -> float:
        self.run(RuntimeError("CUDA error: device lost") if self._device.is_broken else None)
        self.is_done()
        return 1.0


class SteppedCopies:
    """In place of a device's stream: pages are copied in order, when the test says so, and may fail then or at once."""

    def __init__(self) -> None:
        self.is_broken = False
        self._copies: list[_SteppedCopy] = []

    def __call__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> PageCopy:
        if self.is_broken:
            raise RuntimeError("CUDA error: invalid argument")
        self._copies.append(_SteppedCopy(self, sources, targets))
        return self._copies[-1]

    def step(self, num_copies: int, error: RuntimeError | None = None) -> None:
        copies, self._copies = self._copies[:num_copies], self._copies[num_copies:]
        for copy in copies:
            copy.run(error)

    @property
    def is_idle(self) -> bool:
        return not self._copies


def _task_of(info: AdapterInfo) -> TaskId:
    return scoped_task_id(info.tenant, info.lora_task_id)


class ManagerMachine(RuleBasedStateMachine):
    """Puts, pins, acquires, releases and unpins in any order; the model is a dictionary of contents and counts."""

    layout = TINY
    catalogue = CONTENTS
    has_disk = False
    num_host_pages = 8
    num_device_pages: int | None = None
    on_conflict = "refuse"

    def __init__(self) -> None:
        super().__init__()
        self.copies = SteppedCopies()
        self.may_have_failed = False
        self.manager = self.build()
        self.contents: dict[int, int] = {}
        self.held: set[int] = set()
        self.pins: list[tuple[CachedAdapter, int]] = []
        self.users: list[tuple[CachedAdapter, int]] = []

    def build(self) -> LoRAManager:
        return self.build_with(disk=None)

    def build_with(self, disk: DiskTier | None) -> LoRAManager:
        return build_manager(
            self.num_host_pages,
            self.num_device_pages,
            self.on_conflict,
            disk=disk,
            copy_pages=self.copies,
            layout=self.layout,
        )

    @initialize(contents=st.lists(st.integers(0, len(CONTENTS) - 1), min_size=5, max_size=5))
    def fill(self, contents: list[int]) -> None:
        for task, content in enumerate(contents):
            self.put(task, content)

    @rule(task=TASKS, content=st.integers(0, len(CONTENTS) - 1))
    def put(self, task: TaskId, content: int) -> None:
        packed = self.catalogue[content][1]
        present = self._present(task)
        try:
            adapter = self.manager.put(task, packed)
        except AdapterConflict:
            assert self.on_conflict == "refuse"
            assert present
            assert self.contents[task] != content
            return
        except AdapterCacheFull:
            assert not self.can_put(task, len(packed.pages)), "refused although evicting would have been enough"
            assert self._present(task) == present
            return
        assert adapter.digest == packed.digest
        self.contents[task] = content

    @rule(tasks=st.lists(TASKS, min_size=1, max_size=4), num_copies=st.integers(0, 4))
    def request(self, tasks: list[TaskId], num_copies: int) -> None:
        for task in tasks:
            self.pin(task)
        self.schedule(num_copies)
        self.schedule(num_copies)

    def pin(self, task: TaskId) -> None:
        try:
            adapter = self.manager.pin(task)
        except AdapterNotFound:
            assert task not in self.held
            assert not any(a.lora_task_id == task and not a.state.is_retired for a in self._in_use), (
                "a pinned one was evicted"
            )
            return
        except AdapterCacheFull:
            assert self.has_disk
            assert not self.can_pin(task), "refused although requests end"
            return
        assert adapter.digest == self.catalogue[self.contents[task]][1].digest
        self.pins.append((adapter, self.contents[task]))

    @rule(num_copies=st.integers(0, 4))
    def schedule(self, num_copies: int) -> None:
        """What an engine does between two steps, while some copies end."""
        self.copies.step(num_copies)
        self.poll()
        for adapter, content in list(self.pins):
            self.acquire(adapter, content)
        self.poll()
        self.may_have_failed = self.copies.is_broken

    def acquire(self, adapter: CachedAdapter, content: int) -> None:
        in_use = {a for a, _ in self.users}
        if self.manager.memory.acquire(adapter):
            self.users.append((adapter, content))
            self.pins.remove((adapter, content))
        else:
            in_use_pages = sum(len(a.pages) for a in in_use)
            has_index = adapter in in_use or len(in_use) < MAX_LORAS
            has_pages = self.num_device_pages is None or in_use_pages + len(adapter.pages) <= self.num_device_pages
            is_copied = self.copies.is_idle and not self.may_have_failed
            assert not (adapter.rows and has_index and has_pages and is_copied), "refused although there was room"

    @precondition(lambda self: self.users)
    @rule(data=st.data(), is_finished=st.booleans())
    def release(self, data: st.DataObject, is_finished: bool) -> None:
        adapter, content = data.draw(st.sampled_from(self.users))
        self.users.remove((adapter, content))
        self.manager.memory.release(adapter)
        if is_finished:
            self.manager.memory.unpin(adapter)
        else:
            self.pins.append((adapter, content))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        adapter, content = data.draw(st.sampled_from(self.pins))
        self.pins.remove((adapter, content))
        self.manager.memory.unpin(adapter)

    @rule(task=TASKS, is_held=st.booleans())
    def hold(self, task: TaskId, is_held: bool) -> None:
        try:
            (self.manager.hold if is_held else self.manager.end_hold)(task)
        except AdapterNotFound:
            assert task not in self.held
            return
        except AdapterCacheFull:
            assert self.has_disk
            return
        (self.held.add if is_held else self.held.discard)(task)

    @rule(task=TASKS)
    def unload(self, task: TaskId) -> None:
        try:
            self.manager.unload(task)
        except AdapterNotFound:
            assert task not in self.held
            return
        self.held.discard(task)
        del self.contents[task]
        assert not self._present(task)

    @rule(task=TASKS, num_copies=st.integers(1, 4))
    def fail_copies(self, task: TaskId, num_copies: int) -> None:
        """Those under way, and of an adapter that may just be wanted."""
        self.request([task], 0)
        self.may_have_failed = self.may_have_failed or not self.copies.is_idle
        self.copies.step(num_copies, RuntimeError("CUDA error: unspecified launch failure"))

    @rule(is_broken=st.booleans())
    def break_copies(self, is_broken: bool) -> None:
        """From now on copies do not even begin, and those under way fail when they are waited for; or no more."""
        self.copies.is_broken = is_broken
        self.may_have_failed = self.may_have_failed or is_broken

    @rule(task=TASKS)
    def unload_while_its_copy_fails(self, task: TaskId) -> None:
        self.request([task], 0)
        for pin in [pin for pin in self.pins if pin[0].lora_task_id == task]:
            self.pins.remove(pin)
            self.manager.memory.unpin(pin[0])
        was_broken = self.copies.is_broken
        self.break_copies(True)
        self.unload(task)
        self.break_copies(was_broken)

    def poll(self) -> None:
        for adapter, error in self.manager.poll().items():
            self.check_failure(adapter, error)
            assert adapter not in {a for a, _ in self.users}, "it was in use"
            for pin in [pin for pin in self.pins if pin[0] is adapter]:
                self.pins.remove(pin)
                self.manager.memory.unpin(adapter)

    def check_failure(self, adapter: CachedAdapter, error: Exception) -> None:
        """Whether an adapter may have failed like that."""
        assert isinstance(error, AdapterNotLoaded)
        assert self.may_have_failed
        assert "copying it to the device failed: CUDA error" in str(error)
        assert adapter.rows, "the host tier has it still"

    @invariant()
    def sound(self) -> None:
        self.manager.check_integrity()
        described = {_task_of(info): info for info in self.manager.inventory.describe()}
        assert {task for task, info in described.items() if info.is_pinned} == self.held
        for task, info in described.items():
            assert info.digest == self.catalogue[self.contents[task]][1].digest
            assert info.num_pins == sum(a.lora_task_id == task and not a.state.is_retired for a in self._in_use)
        assert self.manager.memory.num_pins == len(self.pins) + len(self.users)
        for adapter, content in dict(self.users).items():
            assert_tables_hold(self.manager, adapter, self.catalogue[content][0])

    @property
    def _in_use(self) -> list[CachedAdapter]:
        return [adapter for adapter, _ in self.pins + self.users]

    def can_put(self, task: TaskId, num_pages: int) -> bool:
        """Whether there has to be room for a new version, with whatever nobody needs evicted."""
        return self._held_pages(task) + num_pages <= self.num_host_pages

    def can_pin(self, task: TaskId) -> bool:
        """Whether there has to be room for an adapter on disk once all requests have ended."""
        needed = [len(self.catalogue[self.contents[other]][1].pages) for other in {*self.held, task}]
        return sum(needed) <= self.num_host_pages

    def _held_pages(self, task: TaskId) -> int:
        """Pages that no eviction can free for a new version of `task`, and those promised to adapters that wait."""
        in_use = set(self._in_use)
        counted = {adapter.lora_task_id for adapter in in_use if not adapter.state.is_retired}
        waiting = {_task_of(info) for info in self.manager.inventory.describe() if info.bytes == 0}
        others = (self.held | waiting) - counted - {task}
        in_use_pages = sum(adapter.num_pages for adapter in in_use)
        return in_use_pages + sum(len(self.catalogue[self.contents[other]][1].pages) for other in others)

    def _present(self, task: TaskId) -> bool:
        try:
            self.manager.inventory.info(task)
        except AdapterNotFound:
            return False
        return True


class ReplacingMachine(ManagerMachine):
    on_conflict = "replace"


class SmallDeviceMachine(ManagerMachine):
    num_device_pages = 4


class SmallReplacingDeviceMachine(ManagerMachine):
    num_device_pages = 4
    on_conflict = "replace"


class _Task(Future[Any]):
    """A task that runs when it is told to, and not because somebody waits for it."""

    def __init__(self, task: Callable[[], Any]) -> None:
        super().__init__()
        self._task = task

    def run(self) -> None:
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(self._task())
            except Exception as error:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        assert self.done(), "the manager waits for the disk"
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        assert self.done(), "the manager waits for the disk"
        return super().exception(timeout)


class SteppedWorkers(Executor):
    """In place of threads: what was submitted happens in order, when the test says so."""

    def __init__(self) -> None:
        self._tasks: list[_Task] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        task = _Task(lambda: fn(*args, **kwargs))
        self._tasks.append(task)
        return task

    def step(self, num_tasks: int) -> None:
        tasks, self._tasks = self._tasks[:num_tasks], self._tasks[num_tasks:]
        for task in tasks:
            task.run()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.step(len(self._tasks))

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)


class Readers(Executor):
    """Readers of files among the workers; while memory is short, what they read is of no use."""

    def __init__(self, workers: SteppedWorkers) -> None:
        self._workers = workers
        self.is_memory_short = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._workers.submit(self._read, fn, *args, **kwargs)

    def _read(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if self.is_memory_short:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return result


class DiskMachine(ManagerMachine):
    """Host memory for few, files for all: nothing is lost unless a write fails or a file is damaged."""

    has_disk = True
    num_disk_bytes = 1 << 20
    is_small = False
    num_host_pages = 4
    on_conflict = "replace"

    def __init__(self) -> None:
        self.is_disk_full = False
        self.may_lose = False
        self.damaged: set[tuple[int, str]] = set()
        self._directory = tempfile.TemporaryDirectory()
        self.workers = SteppedWorkers()
        self.readers = Readers(self.workers)
        self.may_be_unread = False
        super().__init__()

    def build(self) -> LoRAManager:
        directory = Path(self._directory.name)
        disk = DiskTier(
            directory,
            self.num_disk_bytes,
            self.layout,
            write_file=self.write_file,
            workers=lambda num_threads: self.workers if num_threads == 1 else self.readers,
        )
        return self.build_with(disk)

    def write_file(self, path: Path, header: bytes, pages: Sequence[torch.Tensor]) -> None:
        if self.is_disk_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file_atomically(path, header, pages)

    def settle(self) -> None:
        """Let the disk do all it was told to, and what follows from that."""
        self.poll()
        while self.workers.num_tasks:
            self.workers.step(self.workers.num_tasks)
            self.poll()
        if not self._in_use and not self.held:
            assert all(info.bytes for info in self.manager.inventory.describe()), "an adapter waits for nothing"

    def check_failure(self, adapter: CachedAdapter, error: Exception) -> None:
        if isinstance(error, AdapterNotFound):
            assert (adapter.lora_task_id, adapter.digest) in self.damaged
        elif "reading its file failed: Cannot allocate memory" in str(error):
            assert isinstance(error, AdapterNotLoaded)
            assert self.may_be_unread
        else:
            super().check_failure(adapter, error)
            return
        self.note_end_of_hold(adapter)

    def note_end_of_hold(self, adapter: CachedAdapter) -> None:
        """An adapter that failed is held no more, but a version that has replaced it may be."""
        if not any(
            info.is_pinned and _task_of(info) == adapter.lora_task_id for info in self.manager.inventory.describe()
        ):
            self.held.discard(adapter.lora_task_id)

    @rule(is_short=st.booleans())
    def shorten_memory(self, is_short: bool) -> None:
        self.readers.is_memory_short = is_short
        self.may_be_unread = self.may_be_unread or is_short

    @rule(num_tasks=st.integers(1, 4))
    def work(self, num_tasks: int) -> None:
        self.workers.step(num_tasks)

    @rule(is_disk_full=st.booleans())
    def fill_disk(self, is_disk_full: bool) -> None:
        self.is_disk_full = is_disk_full
        self.may_lose = self.may_lose or is_disk_full

    @rule(task=TASKS)
    def keep(self, task: TaskId) -> None:
        try:
            kept = self.manager.save(task)
        except AdapterNotFound:
            return
        assert kept is not None
        if not self.is_small and kept.done() and not kept.cancelled() and kept.exception() is None:
            digest = self.catalogue[self.contents[task]][1].digest
            file = Path(self._directory.name) / f"{label_of(task)}.safetensors"
            assert digest in file.read_bytes().decode("latin-1")

    @rule(task=TASKS, place=st.integers(1, TINY.page_bytes))
    def damage(self, task: TaskId, place: int) -> None:
        """Change a file's byte, and then want the adapter."""
        self.settle()
        path = Path(self._directory.name) / f"{label_of(task)}.safetensors"
        if path.exists():
            self.may_lose = True
            self.damaged.add((task, self.catalogue[self.contents[task]][1].digest))
            content = bytearray(path.read_bytes())
            content[-min(place, self.layout.page_bytes)] ^= 1
            path.write_bytes(content)
            self.pin(task)

    @rule(tasks=st.permutations(TASK_IDS))
    def unload_all_under_way(self, tasks: list[TaskId]) -> None:
        """While some wait for room, and others are being read and written."""
        for task in tasks:
            self.pin(task)
        for task in tasks:
            self.unload(task)

    @rule()
    def restart(self) -> None:
        for adapter, _ in self.users:
            self.manager.memory.release(adapter)
        for adapter in self._in_use:
            self.manager.memory.unpin(adapter)
        for task in self.held:
            self.manager.end_hold(task)
        self.pins, self.users, self.held = [], [], set()
        self.settle()
        self.manager.close()
        for place, path in enumerate(sorted(Path(self._directory.name).glob("*.safetensors"))):
            os.utime(path, (place, place))  # runs that do the same must not differ by the clock
        self.manager = self.build()

    @invariant()
    def nothing_is_lost(self) -> None:
        if not self.may_lose:
            assert {_task_of(info) for info in self.manager.inventory.describe()} == self.contents.keys()

    def teardown(self) -> None:
        self.manager.close()
        self._directory.cleanup()


class SmallDeviceDiskMachine(DiskMachine):
    num_device_pages = 3


class SmallDiskMachine(DiskMachine):
    """Files for fewer than memory holds: what is deleted to make room for others is lost, and nobody is stuck."""

    num_disk_bytes = 4 * TINY.page_bytes
    is_small = True

    def __init__(self) -> None:
        super().__init__()
        self.may_lose = True


class SpanningDiskMachine(DiskMachine):
    """Pieces span pages: room takes pages in a row, which held adapters may break up, and not only as many pages."""

    layout = replace(TINY, page_bytes=1024)
    catalogue = SPANNING_CONTENTS
    num_host_pages = 8

    def can_put(self, task: TaskId, num_pages: int) -> bool:
        is_promised = any(info.bytes == 0 for info in self.manager.inventory.describe())
        return not (self._in_use or self.held or is_promised)

    def can_pin(self, task: TaskId) -> bool:
        return not self.held

    def check_failure(self, adapter: CachedAdapter, error: Exception) -> None:
        if not isinstance(error, AdapterCacheFull):
            super().check_failure(adapter, error)
            return
        assert adapter.shape.runs
        assert self.held, "given up though all requests end"
        if not self._present(adapter.lora_task_id):
            del self.contents[adapter.lora_task_id]  # an upload, which has no file
        self.note_end_of_hold(adapter)

    @rule(tasks=st.permutations(TASK_IDS))
    def hold_small_ones_while_a_large_one_waits(self, tasks: list[TaskId]) -> None:
        """The large one is on disk and needs pages in a row; some of the small ones may lie in the midst of those."""
        *small, waiting = tasks
        self.restart()
        for task, content in ((waiting, LARGE), *((task, 0) for task in small)):
            self.put(task, content)
            self.settle()
        for task in tasks:
            if self._present(task):
                self.pin(task)
        for task in small[::2]:
            self.hold(task, is_held=True)
        self.poll()


MACHINES = [
    ManagerMachine,
    ReplacingMachine,
    SmallDeviceMachine,
    SmallReplacingDeviceMachine,
    DiskMachine,
    SmallDeviceDiskMachine,
    SmallDiskMachine,
    SpanningDiskMachine,
]


MAX_ROUNDS = 12
"""A step that adapters rarely take may need some."""


@cache
def transitions_in(machine: type[ManagerMachine], seed: int) -> frozenset[tuple[State, State]]:
    """The steps that adapters take in many random runs of a machine."""
    taken: set[tuple[State, State]] = set()
    move = AdapterState.move

    def record(state: AdapterState, target: State) -> None:
        (source,) = (own for own in (state.version, state.memory, state.file, state.device) if own in type(target))
        move(state, target)
        taken.add((source, target))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdapterState, "move", record)
        run_state_machine_as_test(
            with_seed(seed)(machine), settings=settings(max_examples=30, stateful_step_count=50, deadline=None)
        )
    return frozenset(taken)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_under_random_use_the_manager_does_as_its_model_and_stays_sound(
    machine: type[ManagerMachine], seed: int
) -> None:
    assert transitions_in(machine, seed + 1) <= TRANSITIONS


def test_random_use_leads_through_every_transition_of_an_adapters_state(seed: int) -> None:
    taken: set[tuple[State, State]] = set()
    for number in range(1, 1 + MAX_ROUNDS):
        for machine in MACHINES:
            taken |= transitions_in(machine, seed + number)
        if taken == TRANSITIONS:
            break
    assert taken == TRANSITIONS


def test_a_held_adapter_that_is_replaced_while_its_file_is_read_waits_for_the_pages_of_the_old_version(
    tmp_path: Path,
) -> None:
    old, new = CONTENTS[2][1], CONTENTS[6][1]
    manager, workers = disk_manager(tmp_path, num_host_pages=len(old.pages) + 1)
    assert len(new.pages) > 1
    manager.put(0, old)
    manager.close()
    manager, workers = disk_manager(tmp_path, num_host_pages=len(old.pages) + 1)
    arrived = manager.hold(0)
    replacement = manager.put(0, new)
    manager.put(1, CONTENTS[0][1])
    assert manager.poll() == {}
    work(manager, workers)
    assert arrived.done()
    assert replacement.state.is_filled
    assert manager.inventory.info(0).is_pinned
    manager.check_integrity()
    manager.close()


def test_an_adapter_whose_run_of_pages_an_operator_breaks_up_is_given_up_and_told(tmp_path: Path) -> None:
    layout, workers = replace(TINY, page_bytes=1024), SteppedWorkers()
    disk = DiskTier(tmp_path, 1 << 20, layout, workers=lambda _: workers)
    manager = build_manager(8, None, "refuse", disk=disk, layout=layout)
    small, large = (wire_adapter(TINY, [row], seed=1) for row in ((1, 0, 1), (6, 0, 16)))
    held = [manager.put(task, pack_adapter(small.weights, small.config, layout)) for task in range(8)][2:6:3]
    waiting = manager.put(8, pack_adapter(large.weights, large.config, layout))
    assert waiting.shape == PageShape(0, (4, 2))
    manager.pin(8)
    for adapter in held:
        manager.hold(adapter.lora_task_id)
    assert [adapter.pages for adapter in held] == [[2], [5]], "four pages in a row are not to be had"
    assert waiting.state.memory is Memory.WAITING
    failures = manager.poll()
    assert isinstance(failures[waiting], AdapterCacheFull)
    assert isinstance(waiting.arrived.exception(), AdapterCacheFull)
    assert waiting.state.memory is Memory.LOST
    assert not manager.inventory.is_known(8)
    manager.check_integrity()
    manager.memory.unpin(waiting)
    assert waiting.state.memory is Memory.GONE
    manager.check_integrity()
    manager.close()


def test_an_adapter_of_both_stacks_lives_in_every_tier(tmp_path: Path) -> None:
    """In host memory, on the device, on disk, and back from there; its fused rows of cross attention, too."""
    layout = ENCODER_DECODER
    rows = [(8, 0, 3), (12, 0, 5), (9, 1, 2), (18, 2, 4), (0, 3, 7), (6, 4, 16), (3, 4, 1)]
    wire = wire_adapter(layout, rows)
    manager = build_manager(4, 2, "refuse", disk=DiskTier(tmp_path, 1 << 20, layout), layout=layout)
    manager.put(1, pack_adapter(wire.weights, wire.config, layout))
    for _ in range(2):
        adapter = manager.pin(1)
        while not manager.memory.acquire(adapter):
            manager.wait()
            manager.poll()
        assert_tables_hold(manager, adapter, wire)
        manager.memory.release(adapter)
        manager.memory.unpin(adapter)
        manager.save(1).result()
        manager.poll()
        manager.check_integrity()
        manager.close()
        disk = DiskTier(tmp_path, 1 << 20, layout)
        manager = build_manager(4, 2, "refuse", disk=disk, layout=layout)
        manager.load(1)
        manager.settle()
    manager.close()


def test_the_least_recently_used_adapter_goes_first_and_only_as_many_as_needed() -> None:
    manager = build_manager(3, None, "refuse")
    for task, content in enumerate((0, 4, 8)):
        assert len(CONTENTS[content][1].pages) == 1
        manager.put(task, CONTENTS[content][1])
    manager.memory.unpin(manager.pin(0))
    manager.put(9, CONTENTS[0][1])
    assert len(manager.host) == 3
    with pytest.raises(
        AdapterNotFound, match=r"LoRA task 1 not found in cache\. Please send LoRA weights with request"
    ):
        manager.inventory.info(1)
    assert manager.stats.host.evictions == 1


def test_a_question_about_an_adapter_does_not_keep_it_longer_and_a_use_does() -> None:
    manager = build_manager(3, None, "refuse")
    for task, content in enumerate((0, 4, 8)):
        manager.put(task, CONTENTS[content][1])
    manager.memory.unpin(manager.pin(1))
    for ask in (manager.inventory.info, manager.inventory.is_known, manager.save, manager.end_hold):
        ask(0)
    assert [info.lora_task_id for info in manager.inventory.describe()] == [0, 2, 1]
    manager.put(3, CONTENTS[0][1])
    assert not manager.inventory.is_known(0)


def test_a_full_cache_of_pinned_adapters_refuses_and_evicts_nothing() -> None:
    manager = build_manager(3, None, "refuse")
    for task, content in enumerate((0, 4, 8)):
        manager.put(task, CONTENTS[content][1])
    for task in (0, 1):
        manager.pin(task)
    with pytest.raises(AdapterCacheFull, match=r"Cache is full\. There are no done tasks to evict.* needs \d+ pages"):
        manager.put(9, CONTENTS[3][1])
    assert len(manager.host) == 3


def test_a_replaced_adapter_serves_who_pinned_it_until_they_let_go() -> None:
    manager = build_manager(8, None, "replace")
    manager.put(5, CONTENTS[0][1])
    old = manager.pin(5)
    manager.put(5, CONTENTS[4][1])
    new = manager.pin(5)
    assert manager.memory.acquire(old)
    assert manager.memory.acquire(new)
    assert manager.device.lora_index(old) != manager.device.lora_index(new)
    assert_tables_hold(manager, old, CONTENTS[0][0])
    assert_tables_hold(manager, new, CONTENTS[4][0])
    manager.memory.release(old)
    manager.memory.unpin(old)
    manager.check_integrity()
    assert manager.inventory.info(5).digest == CONTENTS[4][1].digest


def test_a_replaced_adapter_makes_room_for_its_next_version_before_others_do() -> None:
    manager = build_manager(2, None, "replace")
    for task, content in enumerate((0, 4)):
        manager.put(task, CONTENTS[content][1])
    manager.put(1, CONTENTS[8][1])
    assert len(manager.host) == 2
    assert manager.inventory.info(0).digest == CONTENTS[0][1].digest


def test_an_unloaded_adapter_serves_who_pinned_it_and_nobody_else() -> None:
    manager = build_manager(8, None, "refuse")
    manager.put(5, CONTENTS[0][1])
    manager.hold(5)
    adapter = manager.pin(5)
    assert manager.memory.acquire(adapter)
    manager.unload(5)
    with pytest.raises(AdapterNotFound):
        manager.pin(5)
    with pytest.raises(AdapterNotFound):
        manager.unload(5)
    assert manager.inventory.describe() == []
    assert_tables_hold(manager, adapter, CONTENTS[0][0])
    manager.memory.release(adapter)
    manager.memory.unpin(adapter)
    assert manager.stats.host.bytes_used == 0


def test_an_operators_pin_keeps_an_adapter_and_the_version_that_replaces_it() -> None:
    manager = build_manager(len(CONTENTS[3][1].pages), None, "replace")
    manager.put(5, CONTENTS[0][1])
    manager.hold(5)
    manager.put(5, CONTENTS[4][1])
    with pytest.raises(AdapterCacheFull):
        manager.put(6, CONTENTS[3][1])
    manager.end_hold(5)
    manager.put(6, CONTENTS[3][1])
    assert [info.lora_task_id for info in manager.inventory.describe()] == [6]


def test_what_is_known_of_an_adapter_follows_its_life() -> None:
    events: list[AdapterEvent] = []
    manager = build_manager(len(CONTENTS[3][1].pages), 1, "replace", events.append)
    manager.put(5, CONTENTS[0][1], name="billing")
    (info,) = manager.inventory.describe()
    assert (info.name, info.status, info.location, info.ranks) == ("billing", "DOWNLOADED", "HOST", (1,))
    assert info.bytes == TINY.page_bytes
    adapter = manager.pin(5)
    assert manager.memory.acquire(adapter)
    (info,) = manager.inventory.describe()
    assert (info.status, info.location, info.num_pins, info.num_hits) == ("READY_FOR_USE", "DEVICE", 1, 1)
    manager.put(5, CONTENTS[4][1], origin="downloaded")
    manager.memory.release(adapter)
    manager.memory.unpin(adapter)
    manager.put(6, CONTENTS[3][1])
    manager.unload(6)
    first, second, third = (CONTENTS[content][1].digest for content in (0, 4, 3))
    assert [(event.kind, event.lora_task_id, event.digest) for event in events] == [
        ("uploaded", 5, first),
        ("loaded_to_device", 5, first),
        ("replaced", 5, first),
        ("downloaded", 5, second),
        ("unloaded_from_device", 5, first),
        ("evicted", 5, second),
        ("uploaded", 6, third),
        ("unloaded", 6, third),
    ]


def test_each_tier_counts_what_it_holds_and_what_happened_to_it() -> None:
    manager = build_manager(6, 2, "refuse")
    for task, content in enumerate((0, 4, 8)):
        manager.put(task, CONTENTS[content][1])
    for task in (0, 1, 2, 2):
        adapter = manager.pin(task)
        assert manager.memory.acquire(adapter)
        manager.memory.release(adapter)
        manager.memory.unpin(adapter)
    with pytest.raises(AdapterNotFound):
        manager.pin(9)
    stats = manager.stats
    assert (stats.host.num_adapters, stats.host.hits, stats.host.misses, stats.host.copies) == (3, 4, 1, 3)
    assert (stats.host.bytes_used, stats.host.bytes_total) == (3 * TINY.page_bytes, 6 * TINY.page_bytes)
    device = stats.device
    assert (device.num_adapters, device.hits, device.misses, device.evictions, device.copies) == (2, 1, 3, 1, 3)
    assert (device.bytes_used, device.bytes_total) == (2 * TINY.page_bytes, 2 * TINY.page_bytes)
    assert device.copy_seconds > 0


def test_gateways_hear_who_is_in_memory_and_at_which_level() -> None:
    copies = SteppedCopies()
    manager = build_manager(6, 2, "refuse", copy_pages=copies)
    for task, (content, name) in enumerate(((0, ""), (4, "pirate"), (8, ""))):
        manager.put(task, CONTENTS[content][1], name)
    assert [(a.name, a.level) for a in manager.inventory.residency(9).adapters] == [
        ("2", "cpu"),
        ("pirate", "cpu"),
        ("0", "cpu"),
    ]
    manager.hold(0)
    adapter = manager.pin(0)
    manager.memory.acquire(adapter)
    assert {a.level for a in manager.inventory.residency(9).adapters} == {"cpu"}, "its copy is under way"
    copies.step(1)
    manager.memory.acquire(adapter)
    first, *others = manager.inventory.residency(9).adapters
    assert (first.name, first.level, first.is_pinned, first.rank) == ("0", "gpu", True, 1)
    assert [(a.name, a.level) for a in others] == [("2", "cpu"), ("pirate", "cpu")]
    residency = manager.inventory.residency(2)
    assert [a.name for a in residency.adapters] == ["0", "2"]
    assert (residency.num_on_device, residency.num_in_memory, residency.max_loras) == (1, 3, MAX_LORAS)
    assert (sum(residency.activate_seconds.counts), residency.activate_seconds.total) == (1, 1.0)
    manager.unload(1)
    assert [a.name for a in manager.inventory.residency(9).adapters] == ["0", "2"]
    assert manager.inventory.residency(0).adapters == []


def test_a_wait_ends_when_the_adapter_becomes_usable() -> None:
    manager = build_manager(6, 1, "refuse")
    for task, content in enumerate((0, 4)):
        manager.put(task, CONTENTS[content][1])
    first, second = manager.pin(0), manager.pin(1)
    assert manager.memory.acquire(first)
    assert not manager.memory.acquire(second)
    assert not manager.memory.acquire(second)
    manager.memory.release(first)
    assert manager.memory.acquire(second)
    assert manager.stats.waits == 1


class _CountedDict(OrderedDict[CachedAdapter, Any]):
    """Counts the adapters that somebody looks at one after another."""

    num_seen = 0

    def __iter__(self) -> Iterator[CachedAdapter]:
        for adapter in super().__iter__():
            _CountedDict.num_seen += 1
            yield adapter

    def items(self) -> Any:
        return [(adapter, self[adapter]) for adapter in self]

    def values(self) -> Any:
        return [self[adapter] for adapter in self]


@pytest.mark.parametrize("num_device_pages", [300, 200])
def test_bringing_adapters_to_the_device_looks_at_few_of_those_there(
    num_device_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pages left, and with none; more adapters than steps can use have had a `lora_index` before."""
    for module in ("device_tier", "host_tier"):
        monkeypatch.setattr(f"multilora_engine.lora.{module}.OrderedDict", _CountedDict)
    manager = build_manager(300, num_device_pages, "refuse", max_loras=8)
    packed = CONTENTS[0][1]
    assert len(packed.pages) == 1
    for task in range(250):
        manager.put(task, packed)
    for task in [*range(200), *range(200)]:
        use(manager, task)
    _CountedDict.num_seen = 0
    for task in range(200, 250):
        use(manager, task)
    assert _CountedDict.num_seen <= 2 * 50


def use(manager: LoRAManager, task: TaskId) -> None:
    """What a request of few tokens does."""
    adapter = manager.pin(task)
    assert manager.memory.acquire(adapter)
    manager.memory.release(adapter)
    manager.memory.unpin(adapter)


def test_an_adapter_on_its_way_to_the_device_is_not_dropped_for_another_which_would_wait_for_it() -> None:
    copies = SteppedCopies()
    manager = build_manager(6, 1, "refuse", copy_pages=copies)
    for task, content in enumerate((0, 4)):
        manager.put(task, CONTENTS[content][1])
    first, second = manager.pin(0), manager.pin(1)
    assert not manager.memory.acquire(first)
    assert not manager.memory.acquire(second)
    assert manager.inventory.info(0).status == "LOADED"
    copies.step(1)
    assert not manager.memory.acquire(second), "now its own copy begins"
    copies.step(1)
    assert manager.memory.acquire(second)
    assert_tables_hold(manager, second, CONTENTS[4][0])


@pytest.mark.parametrize("num_device_pages", [4, None])
def test_codes_come_to_the_order_of_a_gpu_once_for_each_copy_and_never_in_pages_of_the_host(
    monkeypatch: pytest.MonkeyPatch, num_device_pages: int | None
) -> None:
    ordered: list[tuple[list[int], ...]] = []
    monkeypatch.setattr(device_tier, "has_own_order", lambda arena: True)
    monkeypatch.setattr(
        device_tier, "order_codes", lambda arena, *where: ordered.append(tuple(x.tolist() for x in where[:3]))
    )
    manager = build_manager(6, num_device_pages, "refuse", max_loras=1)
    for task, content in enumerate((0, 4)):
        manager.put(task, CONTENTS[content][1])
    # Each takes the row of the tables from the other.
    for task in (0, 1, 0, 1):
        use(manager, task)
    assert len(ordered) == (0 if num_device_pages is None else 2)
    adapter = manager.pin(0)
    manager.device.drop(adapter)
    manager.memory.unpin(adapter)
    use(manager, 0)
    assert len(ordered) == (0 if num_device_pages is None else 3)
    sites, tables = manager.device.layout.sites, manager.device.tables
    for ranks, offsets, sizes in ordered[-1:]:
        columns = tables.rank[0].nonzero().flatten().tolist()
        found = sorted(zip(offsets, ranks, sizes, strict=True))
        assert found == sorted(
            (int(tables.b_offset[0, c]), int(tables.rank[0, c]), sites.site_at[c].out_size) for c in columns
        )


def test_a_copy_that_fails_is_told_once_leaves_nothing_and_can_be_tried_again() -> None:
    copies = SteppedCopies()
    manager = build_manager(6, 4, "refuse", copy_pages=copies)
    manager.put(5, CONTENTS[0][1])
    adapter = manager.pin(5)
    assert not manager.memory.acquire(adapter)
    assert manager.poll() == {}
    copies.step(1, RuntimeError("CUDA error: unspecified launch failure"))
    assert not manager.memory.acquire(adapter)
    assert not manager.memory.acquire(adapter), "not again before it is told"
    assert copies.is_idle
    assert manager.is_busy
    (error,) = manager.poll().values()
    assert (type(error), error.code) == (AdapterNotLoaded, "UNAVAILABLE")
    assert "LoRA task 5 is cached and could not be used this time: copying it to the device failed" in str(error)
    assert manager.poll() == {}
    assert (manager.stats.device.bytes_used, manager.stats.device.failures) == (0, 1)
    assert not manager.memory.acquire(adapter)
    assert not manager.memory.acquire(adapter), "a step does not wait for a copy"
    copies.step(1)
    assert manager.memory.acquire(adapter)
    assert_tables_hold(manager, adapter, CONTENTS[0][0])
    manager.check_integrity()


@pytest.mark.parametrize("fails_when", ["it begins", "it ends", "its adapter is dropped"])
def test_a_copy_that_fails_on_a_dead_device_is_no_failure_of_its_adapter(fails_when: str) -> None:
    copies = SteppedCopies()
    manager = build_manager(6, 4, "refuse", copy_pages=copies, is_device_dead=lambda: True)
    manager.put(5, CONTENTS[0][1])
    adapter = manager.pin(5)
    copies.is_broken = fails_when == "it begins"
    if fails_when != "it begins":
        assert not manager.memory.acquire(adapter)
        copies.step(fails_when == "it ends", RuntimeError("CUDA error: unspecified launch failure"))
        copies.is_broken = fails_when != "it ends"
    with pytest.raises(RuntimeError, match="CUDA error: "):
        manager.device.drop(adapter) if fails_when == "its adapter is dropped" else manager.memory.acquire(adapter)
    assert manager.stats.device.failures == 0
    assert not manager.device.has_failures


class _OutOfResources(Exception):
    """As Triton's, which is no RuntimeError."""


@pytest.mark.parametrize("num_device_pages", [4, None])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), _OutOfResources("shared memory")])
def test_a_row_that_is_not_written_to_its_end_leaves_nothing_and_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, num_device_pages: int | None, error: Exception
) -> None:
    """It is the row of another adapter, and the order of codes has come half-way."""
    manager = build_manager(6, num_device_pages, "refuse", max_loras=1)
    for task, content in enumerate((3, 4)):
        manager.put(task, CONTENTS[content][1])
    use(manager, 0)
    write = TableRows.write

    def fail(rows: TableRows, index: int, entries: TableEntries, pages: list[int], has_order: bool = True) -> None:
        write(rows, index, entries, pages, has_order)
        rows.tables.rank[index, ::2] = 0
        if num_device_pages is not None:
            manager.device._pool.storage[pages] = 0xFF
        raise error

    adapter = manager.pin(1)
    with monkeypatch.context() as patch:
        patch.setattr(TableRows, "write", fail)
        if isinstance(error, RuntimeError):
            assert not manager.memory.acquire(adapter)
            manager.check_integrity()
            assert not manager.memory.acquire(adapter), "not again before it is told"
            (told,) = manager.poll().values()
            assert (type(told), told.code) == (AdapterNotLoaded, "UNAVAILABLE")
            assert "writing its row of the tables failed: CUDA out of memory" in str(told)
        else:
            with pytest.raises(_OutOfResources):
                manager.memory.acquire(adapter)
        assert manager.poll() == {}
        manager.check_integrity()
    assert manager.stats.device.failures == isinstance(error, RuntimeError)
    assert manager.memory.acquire(adapter)
    assert_tables_hold(manager, adapter, CONTENTS[4][0])
    manager.check_integrity()


def test_a_row_that_cannot_be_written_on_a_dead_device_is_no_failure_of_its_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = build_manager(6, 4, "refuse", is_device_dead=lambda: True)
    manager.put(5, CONTENTS[0][1])
    adapter = manager.pin(5)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(TableRows, "write", fail)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        manager.memory.acquire(adapter)
    assert not manager.device.has_failures


@pytest.mark.parametrize(
    ("max_loras", "content", "error"), [(2, 3, "wanted, 1 free"), (1, 0, "every row is taken"), (2, 0, "CUDA error")]
)
def test_a_scratch_adapter_that_does_not_come_leaves_nothing(max_loras: int, content: int, error: str) -> None:
    """Beside one of two pages there are no two pages more, no row is free, or the copy fails."""
    copies = SteppedCopies()
    manager = build_manager(1, 3, "refuse", copy_pages=copies, max_loras=max_loras)
    device = manager.device
    with device.scratch_adapter(CONTENTS[3][1]):
        copies.is_broken = error == "CUDA error"
        with (
            pytest.raises((AssertionError, RuntimeError), match=error),
            device.scratch_adapter(CONTENTS[content][1]),
        ):
            pass
    manager.check_integrity()
    assert not device.tables.rank.any()


def disk_manager(directory: Path, num_host_pages: int) -> tuple[LoRAManager, SteppedWorkers]:
    """With a disk that does nothing before it is told to."""
    workers = SteppedWorkers()
    disk = DiskTier(directory, 1 << 20, TINY, workers=lambda _: workers)
    return build_manager(num_host_pages, None, "replace", disk=disk), workers


def work(manager: LoRAManager, workers: SteppedWorkers) -> None:
    while workers.num_tasks:
        workers.step(workers.num_tasks)
        manager.poll()


def test_while_the_disk_blocks_a_newcomer_waits_and_whoever_is_here_goes_on(tmp_path: Path) -> None:
    manager, workers = disk_manager(tmp_path, num_host_pages=2)
    for task, content in enumerate((0, 4, 8)):
        manager.put(task, CONTENTS[content][1])
    assert [manager.inventory.info(task).bytes // TINY.page_bytes for task in range(3)] == [1, 1, 0]
    present, newcomer = manager.pin(1), manager.pin(2)
    assert manager.poll() == {}
    assert manager.memory.acquire(present)
    assert not manager.memory.acquire(newcomer)
    assert manager.is_busy
    with pytest.raises(AdapterCacheFull, match="needs 1 pages, 0 of 2 are free and 1 evictable, 1 of them promised"):
        manager.put(3, CONTENTS[0][1])
    work(manager, workers)
    assert manager.inventory.info(2).bytes > 0
    assert manager.memory.acquire(newcomer)
    assert_tables_hold(manager, newcomer, CONTENTS[8][0])
    assert not manager.is_busy
    assert manager.inventory.info(0).digest == CONTENTS[0][1].digest, "it is on disk"
    for adapter in (present, newcomer):
        manager.memory.release(adapter)
        manager.memory.unpin(adapter)
    manager.close()


def test_one_whose_file_is_written_goes_before_an_older_one_that_would_have_to_wait(tmp_path: Path) -> None:
    manager, workers = disk_manager(tmp_path, num_host_pages=2)
    manager.put(0, CONTENTS[0][1])
    work(manager, workers)
    manager.put(1, CONTENTS[4][1])
    manager.put(0, CONTENTS[0][1])  # the more recently used of the two
    manager.put(2, CONTENTS[8][1])
    assert manager.inventory.info(2).bytes > 0
    assert {info.lora_task_id: info.location for info in manager.inventory.describe()} == {
        0: "DISK",
        1: "HOST",
        2: "HOST",
    }
    manager.close()


def test_a_pin_that_would_keep_a_newcomer_out_for_ever_is_refused(tmp_path: Path) -> None:
    manager, workers = disk_manager(tmp_path, num_host_pages=2)
    for task, content in enumerate((0, 4, 8)):
        manager.put(task, CONTENTS[content][1])
    manager.hold(0)
    with pytest.raises(AdapterCacheFull):
        manager.hold(1)
    work(manager, workers)
    assert {info.lora_task_id: info.location for info in manager.inventory.describe()} == {
        0: "HOST",
        1: "DISK",
        2: "HOST",
    }
    manager.close()


def test_an_adapter_that_got_a_name_later_keeps_it_over_a_restart(tmp_path: Path) -> None:
    manager, workers = disk_manager(tmp_path, num_host_pages=2)
    manager.put(5, CONTENTS[0][1])
    work(manager, workers)
    manager.put(5, CONTENTS[0][1], name="billing")
    manager.close()
    again, _ = disk_manager(tmp_path, num_host_pages=2)
    (info,) = again.inventory.describe()
    assert (info.name, info.location) == ("billing", "DISK")
    again.close()


@pytest.mark.parametrize("is_dora", [False, True])
def test_an_adapter_with_a_row_of_dora_is_told_from_others_in_every_tier(tmp_path: Path, is_dora: bool) -> None:
    wire = wire_adapter(TINY, [(1, 0, 4), (2, 1, 4)], extra_width=256)
    (a, b), module = wire.matrices[2, 1], TINY.sites.module_at[1, 2]
    if is_dora:
        wire.config[1, 3] = 1
        wire.weights[1, a.numel() + b.numel() :][: module.out_size] = 1
    packed = pack_adapter(wire.weights, wire.config, TINY)
    told: list[tuple[str, bool, tuple[str, ...]]] = []

    def tell() -> None:
        (info,) = (info for info in manager.inventory.describe() if info.lora_task_id == 5)
        told.append((info.location, info.is_dora, info.kinds))

    manager, workers = disk_manager(tmp_path, num_host_pages=len(packed.pages))
    manager.put(5, packed)
    tell()
    work(manager, workers)
    manager.put(6, CONTENTS[0][1])
    work(manager, workers)
    tell()
    manager.close()
    manager, workers = disk_manager(tmp_path, num_host_pages=len(packed.pages))
    tell()
    adapter = manager.pin(5)
    work(manager, workers)
    assert manager.memory.acquire(adapter)
    tell()
    manager.memory.release(adapter)
    manager.close()
    kinds = ("LoRA", "DoRA") if is_dora else ("LoRA",)
    assert told == [(location, is_dora, kinds) for location in ("HOST", "DISK", "DISK", "DEVICE")]


def test_what_is_kept_is_found_after_the_engine_was_killed(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "cache", 1 << 20, TINY)
    manager = build_manager(8, None, "refuse", disk=disk)
    manager.put(1, CONTENTS[1][1])
    kept = manager.save(1)
    assert kept is not None
    kept.result(timeout=60)
    # A kill leaves the files as they are.
    shutil.copytree(tmp_path / "cache", tmp_path / "left")
    manager.close()
    (found,) = DiskTier(tmp_path / "left", 1 << 20, TINY).adapters
    assert (found.lora_task_id, found.digest) == (1, CONTENTS[1][1].digest)


def test_what_cannot_be_kept_says_so_and_stays_in_memory(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, num_bytes=1000, layout=TINY)
    manager = build_manager(8, None, "refuse", disk=disk)
    manager.put(1, CONTENTS[1][1])
    kept = manager.save(1)
    assert kept is not None
    with pytest.raises(OSError, match=r"bytes are more than lora_cache_disk_bytes \(1000\)"):
        kept.result(timeout=60)
    assert manager.inventory.info(1).digest == CONTENTS[1][1].digest
    manager.close()


def test_what_is_on_disk_alone_and_comes_again_is_kept_at_once(tmp_path: Path) -> None:
    for _ in range(2):
        manager, workers = disk_manager(tmp_path, num_host_pages=2)
        manager.put(5, CONTENTS[0][1])
        kept = manager.save(5)
        work(manager, workers)
        assert kept is not None
        assert kept.done()
        manager.close()


def test_what_could_not_be_kept_is_written_when_it_is_asked_for_again(tmp_path: Path) -> None:
    workers, is_full = SteppedWorkers(), True

    def write_file(path: Path, header: bytes, pages: Sequence[torch.Tensor]) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file_atomically(path, header, pages)

    disk = DiskTier(tmp_path, 1 << 20, TINY, write_file=write_file, workers=lambda _: workers)
    manager = build_manager(8, None, "refuse", disk=disk)
    manager.put(1, CONTENTS[1][1])
    first = manager.save(1)
    workers.step(workers.num_tasks)
    is_full = False
    manager.put(1, CONTENTS[1][1])
    again = manager.save(1)
    assert first is not None
    assert again is not None
    assert isinstance(first.exception(timeout=0), OSError)
    assert not again.done()
    work(manager, workers)
    assert again.result(timeout=0) is None
    assert (tmp_path / "1.safetensors").exists()
    manager.check_integrity()
    manager.close()


def test_what_a_full_disk_refused_is_written_as_soon_as_the_disk_takes_another_file(tmp_path: Path) -> None:
    workers, is_full = SteppedWorkers(), True

    def write_file(path: Path, header: bytes, pages: Sequence[torch.Tensor]) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file_atomically(path, header, pages)

    disk = DiskTier(tmp_path, 1 << 20, TINY, write_file=write_file, workers=lambda _: workers)
    manager = build_manager(8, None, "refuse", disk=disk)
    for task in (1, 2):
        manager.put(task, CONTENTS[task][1])
    work(manager, workers)
    assert [*tmp_path.iterdir()] == []
    is_full = False
    manager.put(3, CONTENTS[3][1])
    work(manager, workers)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{task}.safetensors" for task in (1, 2, 3)]
    manager.check_integrity()
    manager.close()


def test_without_a_disk_tier_there_is_nothing_to_keep() -> None:
    manager = build_manager(8, None, "refuse")
    manager.put(1, CONTENTS[1][1])
    assert manager.save(1) is None
    with pytest.raises(AdapterNotFound):
        manager.save(2)


def test_a_request_for_one_on_disk_waits_while_requests_hold_all_of_the_memory(tmp_path: Path) -> None:
    manager, workers = disk_manager(tmp_path, num_host_pages=1)
    for task, content in enumerate((0, 4)):
        manager.put(task, CONTENTS[content][1])
        work(manager, workers)
    first, second = manager.pin(1), manager.pin(0)
    work(manager, workers)
    assert manager.memory.acquire(first)
    assert not manager.memory.acquire(second)
    manager.memory.release(first)
    manager.memory.unpin(first)
    manager.poll()
    work(manager, workers)
    assert manager.memory.acquire(second)
    assert_tables_hold(manager, second, CONTENTS[0][0])
    manager.memory.release(second)
    manager.memory.unpin(second)
    manager.close()


@pytest.mark.parametrize(("origin", "way"), [("uploaded", "copy_pages"), ("downloaded", "move_pages")])
def test_a_large_adapter_is_copied_beside_the_steps_and_waits_for_that(
    monkeypatch: pytest.MonkeyPatch, origin: Origin, way: str
) -> None:
    """The engine's thread would stand still for the copy. The pages of one from a source have memory but once."""
    monkeypatch.setattr("multilora_engine.lora.manager.LARGEST_COPY_BYTES", 0)
    may_copy = threading.Event()

    def copy(sources: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        assert may_copy.wait(10)
        {"copy_pages": copy_pages, "move_pages": move_pages}[way](sources, targets)

    monkeypatch.setattr(f"multilora_engine.lora.manager.{way}", copy)
    manager = build_manager(16, None, "replace")
    (wire, packed), other = _adapter(1), _adapter(2)[1]
    arriving = manager.put(7, packed, origin=origin)
    gone = manager.put(8, other, origin=origin)
    manager.pin(7)
    assert not manager.memory.acquire(arriving)
    manager.unload(8)
    manager.check_integrity()
    may_copy.set()
    while manager.is_busy:
        manager.wait(10)
        assert not manager.poll()
        manager.check_integrity()
    assert manager.memory.acquire(arriving)
    assert_tables_hold(manager, arriving, wire)
    assert gone.state.memory is Memory.GONE
    assert manager.host.pool.num_free == 16 - len(arriving.pages)
    assert bool((packed.pages == CONTENTS[1][1].pages).all()) == (origin == "uploaded")
    manager.close()


@pytest.mark.parametrize(("taken", "expected"), [((), [3]), ((1,), [1, 2]), ((0, 2), [1, 2])])
def test_pages_that_follow_each_other_in_both_tiers_are_one_copy(taken: tuple[int, ...], expected: list[int]) -> None:
    """taken: pages of the device that others have."""
    lengths: list[int] = []

    def copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> PageCopy:
        lengths.extend(len(source) for source in sources)
        return copy_at_once(sources, targets)

    manager = build_manager(8, 8, "refuse", copy_pages=copy)
    wire = wire_adapter(TINY, [(m, layer, 16) for layer in range(3) for m in (1, 4, 6)])
    packed = pack_adapter(wire.weights, wire.config, TINY)
    assert packed.num_pages == 3
    pool = manager.device._pool
    pool.allocate(PageShape(8))
    pool.free([page for page in range(8) if page not in taken])
    adapter = manager.put(1, packed)
    manager.pin(1)
    assert manager.memory.acquire(adapter)
    assert_tables_hold(manager, adapter, wire)
    assert sorted(lengths) == expected
