"""Adapters with pieces that span pages: from the wire to the kernels, and through all tiers under random use."""

from __future__ import annotations

import tempfile
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.adapters import SPANNING, WireAdapter, wire_adapter

from multilora_engine.errors import AdapterCacheFull
from multilora_engine.lora.device_tier import DeviceTier, TableRows
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.format import TORCH_DTYPES, pack_adapter
from multilora_engine.lora.free_pages import PagePool
from multilora_engine.lora.host_tier import CachedAdapter, HostTier
from multilora_engine.lora.layout import PackedAdapter, TableEntries, page_shape
from multilora_engine.lora.manager import LoRAManager
from multilora_kernels import LoRATables, lora_segments, reference
from multilora_wire.layout import AdapterLayout, PageShape, num_values
from multilora_wire.sites import AdapterSite, ModelSites, SitePart, WireModule, decoder_sites

CPU = torch.device("cpu")
HEAD = 40
"""A module id of no linear in a layer."""


@st.composite
def models(draw: st.DrawFn) -> ModelSites:
    """Sizes without any pattern, and a head, which is far larger than all else."""
    hidden, q, kv, ffn = (draw(st.integers(1, 70)) for _ in range(4))
    mlp = draw(st.sampled_from([("gate_proj", "up_proj", "down_proj"), ("c_fc", "c_proj")]))
    sites = decoder_sites(draw(st.integers(1, 2)), hidden, q, kv, ffn, mlp)
    vocab, column = draw(st.integers(100, 700)), sites.num_columns
    head = WireModule(HEAD, "head", sites.num_layers - 1, hidden, vocab, (SitePart(column, 0),))
    site = AdapterSite("lm_head", sites.num_layers - 1, hidden, vocab, column)
    return ModelSites((*sites.sites, site), (*sites.modules, head))


@st.composite
def layouts(draw: st.DrawFn) -> AdapterLayout:
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    return AdapterLayout(draw(models()), draw(st.integers(1, 9)), dtype, draw(st.integers(4, 40)) * 64)


def draw_rows(data: st.DataObject, layout: AdapterLayout) -> list[tuple[WireModule, int, bool]]:
    """Modules that adapt no site twice, fused ones among them, with ranks and whether they are DoRA."""
    taken: set[int] = set()
    rows = []
    for module in data.draw(st.permutations(layout.sites.modules)):
        columns = {part.column for part in module.parts}
        if not columns & taken and data.draw(st.booleans()):
            taken |= columns
            rows.append((module, data.draw(st.integers(1, layout.max_rank)), data.draw(st.booleans())))
    return rows or [(layout.sites.modules[-1], layout.max_rank, True)]


Matrices = dict[WireModule, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def to_wire(
    rows: list[tuple[WireModule, int, bool]], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, Matrices]:
    """`lora_weights`, `lora_config`, and A, B and magnitude of each module."""
    weights = torch.zeros(len(rows), max(num_values(*row) for row in rows), dtype=dtype)
    matrices: Matrices = {}
    for i, (module, rank, is_dora) in enumerate(rows):
        a, b = torch.randn(rank, module.in_size).to(dtype), torch.randn(module.out_size, rank).to(dtype)
        magnitude = torch.rand(module.out_size).to(dtype) if is_dora else None
        parts = [a.flatten(), b.flatten(), *([] if magnitude is None else [magnitude])]
        weights[i, : num_values(module, rank, is_dora)] = torch.cat(parts)
        matrices[module] = (a, b, magnitude)
    config = torch.tensor([[m.module_id, m.layer, rank, int(is_dora)] for m, rank, is_dora in rows])
    return weights, config.int(), matrices


def tables_of(packed: PackedAdapter, layout: AdapterLayout, taken: list[int]) -> LoRATables:
    """Tables of one row, with the adapter in an arena where others own the pages `taken`."""
    shape = page_shape(packed.rows, len(packed.pages), layout)
    pool = PagePool(2 * shape.num_pages + len(taken) + sum(shape.runs) * (len(taken) + 1), layout.page_bytes, CPU)
    owned = pool.allocate(PageShape(pool.count))
    pool.free([page for page in owned if page not in taken])
    pool.storage.fill_(0xFF)  # NaN in every dtype
    pages = pool.allocate(shape)
    assert not set(pages) & set(taken)
    for page, source in zip(pages, packed.pages, strict=True):
        pool.storage[page] = source
    table_rows = TableRows(layout, pool.storage, count=1)
    table_rows.write(0, TableEntries.of(packed.rows, layout), pages)
    return table_rows.tables


@settings(max_examples=60, deadline=None)
@given(data=st.data(), layout=layouts(), taken=st.lists(st.integers(0, 30), max_size=6, unique=True))
def test_kernels_see_the_product_of_the_matrices_that_were_sent(
    data: st.DataObject, layout: AdapterLayout, taken: list[int]
) -> None:
    torch.manual_seed(0)
    weights, config, matrices = to_wire(draw_rows(data, layout), TORCH_DTYPES[layout.lora_dtype])
    tables = tables_of(pack_adapter(weights, config, layout), layout, taken)
    segments = lora_segments(torch.zeros(3, dtype=torch.int32), 1)
    adapted = {part.column for module in matrices for part in module.parts}
    assert set(torch.nonzero(tables.rank[0]).flatten().tolist()) == adapted
    for module, (a, b, magnitude) in matrices.items():
        x = torch.randn(3, module.in_size, dtype=torch.float64)
        y = torch.randn(3, module.out_size, dtype=torch.float64)
        expected = y + x @ a.double().T @ b.double().T
        if magnitude is not None:
            expected *= magnitude.double()
        for part in module.parts:
            end = part.start + layout.sites.site_at[part.column].out_size
            v = reference.lora_shrink(x, tables, part.column, 1, segments)
            reference.lora_expand(v, y[:, part.start : end], tables, part.column, [end - part.start], segments)
        torch.testing.assert_close(y, expected)


def _adapter(content: int) -> tuple[WireAdapter, PackedAdapter]:
    """Content `c` takes 1 to 7 pages; some have runs of 2 to 4."""
    rows = {
        0: [(2, 0, 1)],
        1: [(6, 0, 16)],
        2: [(1, 1, 9), (3, 0, 16)],
        3: [(18, 2, 16), (4, 2, 16)],
        4: [(1, 0, 4), (2, 0, 4), (3, 0, 4)],
    }[content]
    wire = wire_adapter(SPANNING, rows, seed=content)
    return wire, pack_adapter(wire.weights, wire.config, SPANNING)


CONTENTS = [_adapter(content) for content in range(5)]
SHAPES = [page_shape(packed.rows, len(packed.pages), SPANNING) for _, packed in CONTENTS]


def test_the_contents_of_the_machine_have_runs_of_several_lengths() -> None:
    assert {length for shape in SHAPES for length in shape.runs} == {2, 4}
    assert [shape.num_pages for shape in SHAPES] == [1, 3, 3, 7, 1]


class Inline(Executor):
    """Does at once what it is told."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class TiersMachine(RuleBasedStateMachine):
    """Twelve tasks share tiers that hold two or three adapters; the model is the content of each task."""

    num_host_pages = 11
    num_device_pages: int | None = 8

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        host = HostTier(self.num_host_pages, SPANNING.page_bytes)
        host.pool.storage.fill_(0xFF)
        device_pool = host.pool
        if self.num_device_pages is not None:
            device_pool = PagePool(self.num_device_pages, SPANNING.page_bytes, CPU)
        disk = DiskTier(Path(self._directory.name), 1 << 20, SPANNING, workers=lambda _: Inline())
        self.manager = LoRAManager(host, DeviceTier(SPANNING, host.pool, device_pool, 3), "replace", disk=disk)
        self.contents: dict[int, int] = {}
        self.held: set[int] = set()
        self.pins: list[tuple[CachedAdapter, int]] = []
        self.users: list[tuple[CachedAdapter, int]] = []

    @rule(task=st.integers(0, 11), content=st.integers(0, len(CONTENTS) - 1))
    def put(self, task: int, content: int) -> None:
        try:
            self.manager.put(task, CONTENTS[content][1])
        except AdapterCacheFull:
            is_promised = any(info.bytes == 0 and info.location == "HOST" for info in self.manager.inventory.describe())
            assert self.pins or self.users or self.held or is_promised, "refused though nothing is in use"
            return
        self.contents[task] = content

    @rule(task=st.integers(0, 11))
    def pin(self, task: int) -> None:
        if task in self.contents:
            try:
                self.pins.append((self.manager.pin(task), self.contents[task]))
            except AdapterCacheFull:
                assert self.held, "refused though all requests end"

    @rule()
    def schedule(self) -> None:
        for adapter, error in self.manager.poll().items():
            assert isinstance(error, AdapterCacheFull)
            assert self.held, "given up though all requests end"
            for pin in [pin for pin in self.pins if pin[0] is adapter]:
                self.pins.remove(pin)
                self.manager.memory.unpin(adapter)
        for adapter, content in list(self.pins):
            if self.manager.memory.acquire(adapter):
                self.pins.remove((adapter, content))
                self.users.append((adapter, content))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.users:
            adapter, _ = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
            self.manager.memory.release(adapter)
            self.manager.memory.unpin(adapter)

    @rule(task=st.integers(0, 11), is_held=st.booleans())
    def hold(self, task: int, is_held: bool) -> None:
        if task in self.contents:
            try:
                (self.manager.hold if is_held else self.manager.end_hold)(task)
            except AdapterCacheFull:
                return
            (self.held.add if is_held else self.held.discard)(task)

    @invariant()
    def sound(self) -> None:
        self.manager.check_integrity()
        for adapter, content in self.users:
            self.assert_weights(adapter, content)

    def assert_weights(self, adapter: CachedAdapter, content: int) -> None:
        index, tables = self.manager.device.lora_index(adapter), self.manager.device.tables
        for (module_id, layer), (a, b) in CONTENTS[content][0].matrices.items():
            for part in SPANNING.sites.module_at[layer, module_id].parts:
                end = part.start + SPANNING.sites.site_at[part.column].out_size
                a_start, b_start = int(tables.a_offset[index, part.column]), int(tables.b_offset[index, part.column])
                assert torch.equal(tables.arena[a_start : a_start + a.numel()], a.flatten())
                own = b[part.start : end].flatten()
                assert torch.equal(tables.arena[b_start : b_start + own.numel()], own)

    def settle(self) -> None:
        """Take up what has ended: a write, then the read that waited for its room, then the copy."""
        for _ in range(4):
            self.schedule()

    def teardown(self) -> None:
        """Nobody is stuck: once nothing is in use, every adapter can be used, one after another."""
        for task in self.held:
            self.manager.end_hold(task)
        self.held = set()
        while self.users or self.pins:
            num_waiting = len(self.pins)
            while self.users:
                adapter, _ = self.users.pop()
                self.manager.memory.release(adapter)
                self.manager.memory.unpin(adapter)
            self.settle()
            assert self.users or len(self.pins) < num_waiting or not self.pins, "they wait for nothing"
        for task in self.contents:
            self.pin(task)
            self.settle()
            assert len(self.users) == 1, "an adapter cannot be used"
            self.sound()
            adapter, _ = self.users.pop()
            self.manager.memory.release(adapter)
            self.manager.memory.unpin(adapter)
        self.manager.close()
        self._directory.cleanup()


class SharedTiersMachine(TiersMachine):
    """As on a CPU: the device's pages are the host's."""

    num_device_pages = None


_SETTINGS = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestTiers = TiersMachine.TestCase
TestSharedTiers = SharedTiersMachine.TestCase
TestTiers.settings = TestSharedTiers.settings = _SETTINGS


@pytest.fixture
def torn(tmp_path: Path) -> LoRAManager:
    """Five host pages: adapters 1 to 5 have one each, adapter 0 (a run of two, and one page) is on disk alone."""
    host = HostTier(5, SPANNING.page_bytes)
    disk = DiskTier(tmp_path, 1 << 20, SPANNING, workers=lambda _: Inline())
    manager = LoRAManager(host, DeviceTier(SPANNING, host.pool, host.pool, 3), "replace", disk=disk)
    for task in range(6):
        manager.put(task, CONTENTS[int(task == 0)][1])
        manager.poll()
    assert [manager.inventory.info(task).location for task in range(6)] == ["DISK", *["HOST"] * 5]
    return manager


def holders_of_pages(manager: LoRAManager, *pages: int) -> list[int]:
    """The tasks whose adapters have these pages, each one."""
    pinned = {task: manager.pin(task) for task in range(1, 6)}
    for adapter in pinned.values():
        manager.memory.unpin(adapter)
    return [task for page in pages for task, adapter in pinned.items() if adapter.pages == [page]]


def test_an_adapter_for_whose_runs_held_ones_leave_no_room_is_refused(torn: LoRAManager) -> None:
    for task in holders_of_pages(torn, 1, 3):
        torn.hold(task)
    with pytest.raises(AdapterCacheFull):
        torn.pin(0)
    torn.end_hold(holders_of_pages(torn, 3)[0])
    adapter = torn.pin(0)
    torn.poll()
    assert torn.memory.acquire(adapter)


def test_an_adapter_that_would_wait_for_ever_is_given_up_and_its_file_stays(torn: LoRAManager) -> None:
    holders = holders_of_pages(torn, 1, 3)
    others = [torn.pin(task) for task in range(1, 6)]
    waiting = torn.pin(0)
    for task in holders:
        torn.hold(task)
    ((adapter, error),) = torn.poll().items()
    assert adapter is waiting
    assert isinstance(error, AdapterCacheFull)
    for adapter in [waiting, *others]:
        torn.memory.unpin(adapter)
    torn.check_integrity()
    for task in holders:
        torn.end_hold(task)
    adapter = torn.pin(0)
    torn.poll()
    assert torn.memory.acquire(adapter)
