"""Both adapter tiers under random use, against a model so simple that it cannot be wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.adapters import TINY, WireAdapter, wire_adapter

from multilora_engine.errors import AdapterCacheFull, AdapterConflict, AdapterNotFound
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.format import SLICES, PackedAdapter, lora_modules, pack_adapter
from multilora_engine.lora.host_tier import CachedAdapter, HostTier
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.page_pool import PagePool

MAX_LORAS = 3


def _adapter(content: int) -> tuple[WireAdapter, PackedAdapter]:
    """Content `c` takes 1 to 3 pages and has its own numbers in it."""
    ranks = {0: [1], 1: [16, 16, 16], 2: [16] * 6, 3: [16] * 7}[content % 4]
    rows = [((1, 2, 3, 4, 5, 6, 7)[i], content % 3, rank) for i, rank in enumerate(ranks)]
    wire = wire_adapter(TINY, rows, seed=content)
    return wire, pack_adapter(wire.weights, wire.config, TINY)


CONTENTS = [_adapter(content) for content in range(12)]


def build_manager(num_host_pages: int, num_device_pages: int | None, on_conflict: str) -> LoRAManager:
    host = HostTier(num_host_pages, TINY.page_bytes)
    host.pool.storage.fill_(0xFF)  # NaN in every dtype: what is read must have been written
    device_pool = host.pool
    if num_device_pages is not None:
        device_pool = PagePool(num_device_pages, TINY.page_bytes, torch.device("cpu"))
        device_pool.storage.fill_(0xFF)
    return LoRAManager(host, DeviceTier(TINY, host.pool, device_pool, MAX_LORAS), on_conflict)  # type: ignore[arg-type]


def assert_tables_hold(manager: LoRAManager, adapter: CachedAdapter, wire: WireAdapter) -> None:
    """The tables' row of an acquired adapter addresses exactly its own matrices, and nothing else."""
    index, tables = manager.lora_index(adapter), manager.tables
    expected_columns = set()
    for (module_id, layer), (a, b) in wire.matrices.items():
        module = lora_modules(TINY)[module_id]
        ends = [start for _, start in module.slice_starts[1:]] + [module.out_size]
        for (name, start), end in zip(module.slice_starts, ends, strict=True):
            column = layer * len(SLICES) + SLICES.index(name)
            expected_columns.add(column)
            rank = int(tables.rank[index, column])
            assert rank == a.shape[0]
            a_offset, b_offset = int(tables.a_offset[index, column]), int(tables.b_offset[index, column])
            assert torch.equal(tables.arena[a_offset : a_offset + a.numel()].view_as(a), a)
            part = b[start:end]
            assert torch.equal(tables.arena[b_offset : b_offset + part.numel()].view_as(part), part)
    assert set(torch.nonzero(tables.rank[index]).flatten().tolist()) == expected_columns


class ManagerMachine(RuleBasedStateMachine):
    """Puts, pins, acquires, releases and unpins in any order; the model is a dictionary of contents and counts."""

    num_host_pages = 8
    num_device_pages: int | None = None
    on_conflict = "refuse"

    def __init__(self) -> None:
        super().__init__()
        self.manager = build_manager(self.num_host_pages, self.num_device_pages, self.on_conflict)
        self.contents: dict[int, int] = {}
        self.pins: list[tuple[CachedAdapter, int]] = []
        self.users: list[tuple[CachedAdapter, int]] = []

    @rule(task=st.integers(0, 9), content=st.integers(0, len(CONTENTS) - 1))
    def put(self, task: int, content: int) -> None:
        packed = CONTENTS[content][1]
        present = self._present(task)
        try:
            adapter = self.manager.put(task, packed)
        except AdapterConflict:
            assert self.on_conflict == "refuse"
            assert present
            assert self.contents[task] != content
            return
        except AdapterCacheFull:
            pinned = sum(len(a.pages) for a in {a for a, _ in self.pins + self.users})
            assert pinned + len(packed.pages) > self.num_host_pages, "refused although evicting would have been enough"
            assert self._present(task) == present
            return
        assert adapter.digest == packed.digest
        self.contents[task] = content

    @rule(task=st.integers(0, 9))
    def pin(self, task: int) -> None:
        try:
            adapter = self.manager.pin(task)
        except AdapterNotFound:
            assert not any(a.lora_task_id == task and not a.is_retired for a, _ in self.pins + self.users), (
                "a pinned one was evicted"
            )
            return
        assert adapter.digest == CONTENTS[self.contents[task]][1].digest
        self.pins.append((adapter, self.contents[task]))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        adapter, content = data.draw(st.sampled_from(self.pins))
        in_use = {a for a, _ in self.users}
        if self.manager.acquire(adapter):
            self.users.append((adapter, content))
            self.pins.remove((adapter, content))
        else:
            in_use_pages = sum(len(a.pages) for a in in_use)
            has_index = adapter in in_use or len(in_use) < MAX_LORAS
            has_pages = self.num_device_pages is None or in_use_pages + len(adapter.pages) <= self.num_device_pages
            assert not (has_index and has_pages), "refused although there was room"

    @precondition(lambda self: self.users)
    @rule(data=st.data(), is_finished=st.booleans())
    def release(self, data: st.DataObject, is_finished: bool) -> None:
        adapter, content = data.draw(st.sampled_from(self.users))
        self.users.remove((adapter, content))
        self.manager.release(adapter)
        if is_finished:
            self.manager.unpin(adapter)
        else:
            self.pins.append((adapter, content))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        adapter, content = data.draw(st.sampled_from(self.pins))
        self.pins.remove((adapter, content))
        self.manager.unpin(adapter)

    @invariant()
    def sound(self) -> None:
        self.manager.check_integrity()
        assert self.manager.num_pins == len(self.pins) + len(self.users)
        for adapter, content in dict(self.users).items():
            assert_tables_hold(self.manager, adapter, CONTENTS[content][0])

    def _present(self, task: int) -> bool:
        try:
            self.manager.digest(task)
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


_SETTINGS = settings(max_examples=15, stateful_step_count=50, deadline=None)
TestShared = ManagerMachine.TestCase
TestSharedReplacing = ReplacingMachine.TestCase
TestSmallDevice = SmallDeviceMachine.TestCase
TestSmallDeviceReplacing = SmallReplacingDeviceMachine.TestCase
for case in (TestShared, TestSharedReplacing, TestSmallDevice, TestSmallDeviceReplacing):
    case.settings = _SETTINGS


def test_the_least_recently_used_adapter_goes_first_and_only_as_many_as_needed() -> None:
    manager = build_manager(3, None, "refuse")
    for task, content in enumerate((0, 4, 8)):
        assert len(CONTENTS[content][1].pages) == 1
        manager.put(task, CONTENTS[content][1])
    manager.unpin(manager.pin(0))
    manager.put(9, CONTENTS[0][1])
    assert manager.num_cached == 3
    with pytest.raises(
        AdapterNotFound, match=r"LoRA task 1 not found in cache\. Please send LoRA weights with request"
    ):
        manager.digest(1)
    assert manager.stats.evictions == 1


def test_a_full_cache_of_pinned_adapters_refuses_and_evicts_nothing() -> None:
    manager = build_manager(3, None, "refuse")
    for task, content in enumerate((0, 4, 8)):
        manager.put(task, CONTENTS[content][1])
    for task in (0, 1):
        manager.pin(task)
    with pytest.raises(AdapterCacheFull, match=r"Cache is full\. There are no done tasks to evict.* needs \d+ pages"):
        manager.put(9, CONTENTS[3][1])
    assert manager.num_cached == 3


def test_a_replaced_adapter_serves_who_pinned_it_until_they_let_go() -> None:
    manager = build_manager(8, None, "replace")
    manager.put(5, CONTENTS[0][1])
    old = manager.pin(5)
    manager.put(5, CONTENTS[4][1])
    new = manager.pin(5)
    assert manager.acquire(old)
    assert manager.acquire(new)
    assert manager.lora_index(old) != manager.lora_index(new)
    assert_tables_hold(manager, old, CONTENTS[0][0])
    assert_tables_hold(manager, new, CONTENTS[4][0])
    manager.release(old)
    manager.unpin(old)
    manager.check_integrity()
    assert manager.digest(5) == CONTENTS[4][1].digest
