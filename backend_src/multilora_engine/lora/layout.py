"""Packed adapters: the form that every tier stores.

Imports no torch: that costs a front more than a second and 100 MB, and not every front handles weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multilora_wire.layout import AdapterLayout, PageShape, num_run_pages
from multilora_wire.sites import OUTER_LAYER, ROW_MODULES, WireModule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PackedRow:
    """One (module, layer) of an adapter, or one of its parts outside the layers: see `multilora_wire.sites.OuterSites`.

    Offsets are bytes from the start of the adapter's own pages, as if the pages lay one after another: page
    `offset // page_bytes`, place `offset % page_bytes`. Of rows of tokens `rank` is their number, and `a_offset` and
    `b_offset` are the places of the ids and of the rows.
    """

    module_id: int
    layer: int
    rank: int
    a_offset: int
    b_offset: int
    magnitude_offset: int
    """-1 without DoRA."""

    @property
    def is_dora(self) -> bool:
        return self.magnitude_offset >= 0

    @property
    def is_tokens(self) -> bool:
        """Whether it is rows of tokens: `rank` is their number, and no rank."""
        return self.module_id in ROW_MODULES

    @property
    def offsets(self) -> list[int]:
        """The offsets of A, B and, for DoRA, the magnitude; or of ids and rows."""
        return [self.a_offset, self.b_offset, self.magnitude_offset][: 3 if self.is_dora else 2]


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter in packed form, rows sorted by layer and module.

    digest: 32 hex digits over rows and pages, or over the values that were sent where they are stored as codes: equal
        for the same adapter, sent in any row order, row width or wire dtype (of the same values).
    pages: uint8 [num_pages, page_bytes]; bytes that no row covers are zero.
    """

    digest: str
    rows: list[PackedRow]
    pages: torch.Tensor


def page_shape(rows: Iterable[PackedRow], num_pages: int, layout: AdapterLayout) -> PageShape:
    """The shape of the pages that packing gave these rows."""
    if layout.largest_piece.num_bytes <= layout.page_bytes:
        rows = [row for row in rows if row.layer == OUTER_LAYER]
    sizes = [piece.num_bytes for row in rows for piece in layout.pieces(module_of(row, layout), row.rank, row.is_dora)]
    runs = sorted((num_run_pages(size, layout.page_bytes) for size in sizes if size > layout.page_bytes), reverse=True)
    return PageShape(num_pages - sum(runs), tuple(runs))


def module_of(row: PackedRow, layout: AdapterLayout) -> WireModule:
    """The module of a row that fits the model."""
    return layout.sites.module_at[row.layer, row.module_id]
