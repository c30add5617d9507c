"""`TableRows`: the rows of the device's tables, by which a step addresses the weights of its adapters."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from multilora_engine.execution.transfer import to_device
from multilora_engine.lora.format import ARENA_DTYPES
from multilora_engine.lora.layout import PackedRow
from multilora_kernels import LoRATables
from multilora_wire.layout import AdapterLayout
from multilora_wire.pieces import magnitude_itemsize, part_offset


class TableRows:
    """`count` rows, each free or of one adapter; a row's number is the `lora_index`."""

    def __init__(self, layout: AdapterLayout, storage: torch.Tensor, count: int) -> None:
        """storage: the device's pages, uint8 [num_pages, page_bytes]."""
        self._layout = layout
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        shape, device = (count, layout.sites.num_columns), storage.device
        self.tables = LoRATables(
            arena=storage.view(-1).view(ARENA_DTYPES[layout.lora_dtype]),
            rank=torch.zeros(shape, dtype=torch.int32, device=device),
            a_offset=torch.zeros(shape, dtype=torch.int64, device=device),
            b_offset=torch.zeros(shape, dtype=torch.int64, device=device),
            magnitude_offset=torch.full(shape, -1, dtype=torch.int64, device=device),
            max_rank=layout.max_rank,
        )

    def claim(self) -> int | None:
        """A free row, if there is one."""
        return self._free.pop() if self._free else None

    def free(self, lora_index: int) -> None:
        self._free.append(lora_index)

    def write(self, index: int, rows: list[PackedRow], pages: list[int]) -> None:
        """Let a row address an adapter's matrices, which lie in `pages`."""
        entries = _table_entries(rows, pages, self._layout)
        columns, ranks, a_offsets, b_offsets, magnitude_offsets = to_device(entries, self.tables.rank.device)
        self.tables.rank[index] = 0
        self.tables.rank[index, columns] = ranks.int()
        self.tables.a_offset[index, columns] = a_offsets
        self.tables.b_offset[index, columns] = b_offsets
        self.tables.magnitude_offset[index, columns] = magnitude_offsets

    def check_integrity(self, used: Iterable[int]) -> None:
        assert sorted([*used, *self._free]) == list(range(self.count)), "a lora_index is lost or shared"


def _table_entries(rows: list[PackedRow], pages: list[int], layout: AdapterLayout) -> torch.Tensor:
    """int64 [5, num_sites]: column, rank, and the offsets of A, B and magnitude as elements of the whole arena."""
    entries = []
    for row in rows:
        a_offset = _arena_offset(row.a_offset, pages, layout)
        b_offset = _arena_offset(row.b_offset, pages, layout)
        magnitude_offset = _arena_offset(row.magnitude_offset, pages, layout) if row.is_dora else -1
        magnitude_elements = magnitude_itemsize(layout.lora_dtype) // layout.itemsize
        module = layout.sites.module_at[row.layer, row.module_id]
        for index, part in enumerate(module.parts):
            b_part = b_offset + part_offset(module, index, row.rank, layout.lora_dtype) // layout.itemsize
            magnitude = magnitude_offset + part.start * magnitude_elements if row.is_dora else -1
            entries.append((part.column, row.rank, a_offset, b_part, magnitude))
    return torch.tensor(entries, dtype=torch.int64).T.contiguous()


def _arena_offset(offset: int, pages: list[int], layout: AdapterLayout) -> int:
    """Turn bytes in the adapter's own pages into elements in the whole arena.

    The pages of a piece that spans them are consecutive in the arena, too.
    """
    page, place = divmod(offset, layout.page_bytes)
    return (pages[page] * layout.page_bytes + place) // layout.itemsize
