"""Packed adapters: the form that every tier stores.

Imports no torch: that costs a front more than a second and 100 MB, and not every front handles weights.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from multilora_wire.adapter_info import AdapterMember
from multilora_wire.adapter_use import parse_use
from multilora_wire.layout import AdapterLayout, PageShape, num_run_pages
from multilora_wire.pieces import Piece, magnitude_itemsize, part_offset
from multilora_wire.sites import OUTER_LAYER, ROW_MODULES, WireModule

if TYPE_CHECKING:
    import torch

DIGEST_BYTES = 16
"""The length of the digest of an adapter, which is told in hex digits."""

MAX_INVOCATION_TOKENS = 256
"""Invocation tokens of an adapter. Each prompt is searched for the tokens on the engine's thread."""

_LARGEST_TOKEN_ID = sys.maxunicode
"""More than any vocabulary has. A prompt is searched as a text of one character a token."""


class PackedRow(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One (module, layer, expert) of an adapter, or one of its parts outside the layers: see
    `multilora_wire.sites.OuterSites`.

    Offsets are bytes from the start of the adapter's own pages, as if the pages lay one after another: page
    `offset // page_bytes`, place `offset % page_bytes`. Of rows of tokens `rank` is their number, and `a_offset` and
    `b_offset` are the places of the ids and of the rows.

    expert: 0 for a linear that no router chooses. The A's of one layer's experts that have equal bits are one A, with
    one `a_offset`.
    """

    module_id: int
    layer: int
    rank: int
    a_offset: int
    b_offset: int
    magnitude_offset: int
    """-1 without DoRA."""
    expert: int = 0

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


class AdapterTraits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an adapter is beside its matrices. Every field is empty for a plain adapter.

    invocation_tokens: the adapter is activated: its weights count from the first token of the last occurrence of these
        tokens in the prompt on, and the base computes all tokens before that.
    rope: the adapter has rotary embeddings of its own, for all tokens: `context_length` or `rope_parameters` of its
        configuration, as `PeftConfig.rope` writes them.
    members: the adapter is a set of these, by digest and weight, and has the digest that `set_digest` makes of both.
    use: `AdapterUse.text` of how it is to be asked, where its folder says that.

    Raises ValueError for fields that no adapter can have.
    """

    invocation_tokens: tuple[int, ...] = ()
    rope: str = ""
    members: tuple[AdapterMember, ...] = ()
    use: str = ""

    def __post_init__(self) -> None:
        if len(self.invocation_tokens) > MAX_INVOCATION_TOKENS:
            raise ValueError(
                f"there are {len(self.invocation_tokens)} invocation tokens, at most {MAX_INVOCATION_TOKENS} are taken"
            )
        for token_id in self.invocation_tokens:
            if not 0 <= token_id <= _LARGEST_TOKEN_ID:
                raise ValueError(f"the invocation tokens have {token_id}, expected 0 .. {_LARGEST_TOKEN_ID}")
        parse_use(self.use)

    def digest(self, content: str) -> str:
        """The digest of an adapter with these traits. content: the digest of its matrices alone, its own if plain."""
        if self == NO_TRAITS:
            return content
        text = f"traits of {content}: {msgspec.json.encode(self).decode()}"
        return blake3(text.encode()).hexdigest(DIGEST_BYTES)

    def start(self, prompt_token_ids: list[int]) -> int | None:
        """The position in a prompt from which on the adapter computes; None if the invocation tokens are not in it."""
        if not self.invocation_tokens:
            return 0
        # Python searches texts in linear time, whatever the tokens are. Reversed: the last occurrence comes first.
        place = _as_text(reversed(prompt_token_ids)).find(_as_text(reversed(self.invocation_tokens)))
        return None if place < 0 else len(prompt_token_ids) - place - len(self.invocation_tokens)


def set_digest(members: Iterable[tuple[str, float]]) -> str:
    """The digest of a set by the digests and weights of its members, in any order."""
    digest = blake3(b"set")
    for member, weight in sorted(members):
        digest.update(bytes.fromhex(member) + struct.pack("<f", weight))
    return digest.hexdigest(DIGEST_BYTES)


NO_TRAITS = AdapterTraits()
"""The traits of a plain adapter."""


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter in packed form, rows sorted by layer, module and expert.

    digest: 32 hex digits over rows, pages and traits, or, where values are stored as codes, over the values that were
        sent and traits: equal for the same adapter, sent in any row order, row width or wire dtype of the same values.
    pages: uint8 [num_pages, page_bytes]; bytes that no row covers are zero. entries: None until somebody makes them.
    """

    digest: str
    rows: list[PackedRow]
    pages: torch.Tensor
    traits: AdapterTraits = NO_TRAITS
    entries: TableEntries | None = None

    @property
    def num_pages(self) -> int:
        return len(self.pages)


def _as_text(token_ids: Iterable[int]) -> str:
    """A text of one character a token."""
    return "".join(map(chr, token_ids))


@dataclass(frozen=True, eq=False)
class TableEntries:
    """The entries of `LoRATables` that an adapter has, wherever its pages lie: writing them looks at no row.

    columns, ranks: int64 [n]. page, place: int64 [3, n], of A, B and magnitude: a page of the adapter, and elements of
    the arena from its start; -1 for a magnitude that is not there. outer: the rows outside the layers. module_ids: of
    all rows, ascending.
    """

    columns: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int64]
    page: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    outer: tuple[PackedRow, ...]
    module_ids: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[PackedRow], layout: AdapterLayout) -> TableEntries:
        """rows: that fit the model."""
        entries: list[tuple[int, int, int, int, int]] = []
        magnitude_bytes, module_at = magnitude_itemsize(layout.lora_dtype), layout.sites.module_at
        for row in rows:
            module, magnitude = module_at[row.layer, row.module_id], row.magnitude_offset
            if len(module.parts) == 1:
                column = module.parts[0].column + row.expert
                entries.append((column, row.rank, row.a_offset, row.b_offset, magnitude))
                continue
            for index, part in enumerate(module.parts):
                b_offset = row.b_offset + part_offset(module, index, row.rank, layout.lora_dtype)
                part_magnitude = magnitude + part.start * magnitude_bytes if magnitude >= 0 else -1
                entries.append((part.column, row.rank, row.a_offset, b_offset, part_magnitude))
        table = np.array(entries, np.int64).reshape(-1, 5).T.copy()
        page, place = np.divmod(table[2:], layout.page_bytes)
        place = np.where(table[2:] < 0, -1, place // layout.itemsize)
        outer = tuple(row for row in rows if row.layer == OUTER_LAYER)
        module_ids = tuple(sorted({row.module_id for row in rows}))
        return cls(table[0], table[1], page, place, outer, module_ids)

    def located(self, pages: Sequence[int], layout: AdapterLayout) -> npt.NDArray[np.int64]:
        """The places of A, B and magnitude as elements of the whole arena, int64 [3, n]. pages: of the arena.

        The pages of a piece that spans them are consecutive in the arena, too.
        """
        starts = np.array([*pages, 0], np.int64) * (layout.page_bytes // layout.itemsize)  # the last is of page -1
        return starts[self.page] + self.place


def own_pieces(rows: Iterable[PackedRow], layout: AdapterLayout) -> Iterator[tuple[int, Piece]]:
    """The pieces of rows with their offsets, in the order in which packing places them.

    An A that several experts of a layer have is a piece of the first row that has it.
    """
    shared: set[tuple[int, int, int, int]] = set()
    key, pieces = (-1, 0, 0, False), list[Piece]()
    for row in rows:
        module = module_of(row, layout)
        if (row.layer, row.module_id, row.rank, row.is_dora) != key:
            key = (row.layer, row.module_id, row.rank, row.is_dora)
            pieces = layout.pieces(module, row.rank, row.is_dora)
        placed = zip(row.offsets, pieces, strict=True)
        if module.experts > 1:
            a = (row.layer, row.a_offset, row.rank, module.in_size)
            if a in shared:
                next(placed)
            shared.add(a)
        yield from placed


def page_shape(rows: Iterable[PackedRow], num_pages: int, layout: AdapterLayout) -> PageShape:
    """The shape of the pages that packing gave these rows."""
    spanning: dict[tuple[int, int, int], bool] = {}
    wide: list[PackedRow] = []
    for row in rows:
        key = (row.layer, row.module_id, row.rank)
        if key not in spanning:
            pieces = layout.pieces(module_of(row, layout), row.rank, row.is_dora)
            spanning[key] = any(piece.num_bytes > layout.page_bytes for piece in pieces)
        if spanning[key]:
            wide.append(row)
    sizes = (piece.num_bytes for _, piece in own_pieces(wide, layout))
    runs = sorted((num_run_pages(size, layout.page_bytes) for size in sizes if size > layout.page_bytes), reverse=True)
    return PageShape(num_pages - sum(runs), tuple(runs))


def module_of(row: PackedRow, layout: AdapterLayout) -> WireModule:
    """The module of a row that fits the model."""
    return layout.sites.module_at[row.layer, row.module_id]
