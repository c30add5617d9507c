"""`OuterTables`: the parts of adapters outside the layers, as a step wants them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from multilora_engine.batch.forward_batch import OuterParts
from multilora_engine.lora.format import TORCH_DTYPES
from multilora_engine.lora.layout import PackedRow
from multilora_kernels import TokenRows, TokenRowTables
from multilora_wire.layout import AdapterLayout
from multilora_wire.sites import EMBEDDING_LORA, EMBEDDING_ROWS, HEAD_LORA, HEAD_ROWS, TIED_ROWS


@dataclass(frozen=True)
class _Parts:
    """The parts of one adapter."""

    embedding_rows: TokenRows | None
    head_rows: TokenRows | None
    has_embedding_lora: bool
    has_head_lora: bool


class OuterTables:
    """By `lora_index`, the parts of the adapters that have any. `LoRATables` tells the places of their matrices."""

    def __init__(self, layout: AdapterLayout, storage: torch.Tensor, count: int) -> None:
        """storage: the device's pages, uint8 [num_pages, page_bytes]. count: of `lora_index`es."""
        self._layout = layout
        self._count = count
        self._bytes = storage.view(-1)
        self._floats = self._bytes.view(TORCH_DTYPES.get(layout.lora_dtype, torch.float32))
        self._parts: dict[int, _Parts] = {}
        self._latest: tuple[frozenset[int], OuterParts] | None = None

    def write(self, index: int, rows: Sequence[PackedRow], pages: list[int]) -> None:
        """Let an index stand for an adapter. rows: those outside the layers. pages: of the adapter."""
        self.forget(index)
        outer = {row.module_id: row for row in rows}
        if outer:
            self._parts[index] = _Parts(
                self._token_rows(outer.get(EMBEDDING_ROWS) or outer.get(TIED_ROWS), pages),
                self._token_rows(outer.get(HEAD_ROWS) or outer.get(TIED_ROWS), pages),
                EMBEDDING_LORA in outer,
                HEAD_LORA in outer,
            )

    def forget(self, index: int) -> None:
        """No adapter has the index any more."""
        self._parts.pop(index, None)
        self._latest = None

    def parts_of(self, indices: Iterable[int]) -> OuterParts | None:
        """The parts of these adapters; None where there are none. The last answer is kept."""
        if not self._parts:
            return None
        wanted = frozenset(indices) & self._parts.keys()
        if not wanted:
            return None
        if self._latest is None or self._latest[0] != wanted:
            self._latest = (wanted, self._built({index: self._parts[index] for index in sorted(wanted)}))
        return self._latest[1]

    def _built(self, parts: dict[int, _Parts]) -> OuterParts:
        embedding_rows = {index: part.embedding_rows for index, part in parts.items() if part.embedding_rows}
        head_rows = {index: part.head_rows for index, part in parts.items() if part.head_rows}
        return OuterParts(
            self._row_tables(embedding_rows),
            self._row_tables(head_rows),
            any(part.has_embedding_lora for part in parts.values()),
            any(part.has_head_lora for part in parts.values()),
        )

    def _row_tables(self, rows: dict[int, TokenRows]) -> TokenRowTables | None:
        outer = self._layout.sites.outer
        assert outer is not None
        if not rows:
            return None
        return TokenRowTables(self._floats, rows, outer.embeddings.out_size, outer.vocab_size, self._count)

    def _token_rows(self, row: PackedRow | None, pages: list[int]) -> TokenRows | None:
        if row is None:
            return None
        start = arena_bytes(row.a_offset, pages, self._layout)
        ids = self._bytes[start : start + 4 * row.rank].view(torch.int32).long()
        return TokenRows(ids, arena_bytes(row.b_offset, pages, self._layout) // self._floats.itemsize)


def arena_bytes(offset: int, pages: list[int], layout: AdapterLayout) -> int:
    """Turn bytes in the adapter's own pages into bytes in the whole arena.

    The pages of a piece that spans them are consecutive in the arena, too.
    """
    page, place = divmod(offset, layout.page_bytes)
    return pages[page] * layout.page_bytes + place
