"""How adapters of a model are stored: the pieces of a row, and their places in pages of one size. Numbers, no weights.

Each A, B and, for DoRA, the magnitude is a *piece*. A piece starts on a 64-byte boundary. Pieces are placed largest
first, each into the first page with room. A piece that fits into one page never straddles two. A larger piece *spans*:
it starts with a run of consecutive new pages and takes as many as it needs; smaller pieces fill the rest of the run's
last page. Spanning pieces are the largest, so an adapter's runs are its first pages, longest run first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby

import msgspec

from multilora_wire.pieces import CODE_BITS, Piece, element_bytes, stored_pieces
from multilora_wire.sites import LAYERS, PLAIN_EXPERTS, ModelSites, WireModule

ALIGNMENT_BYTES = 64
MIN_PAGE_BYTES = 256 * 1024
MAX_PAGE_BYTES = 8 * 1024 * 1024
PAGE_UNIT_BYTES = 4096

_ROW_BYTES = 160
"""Of the header of a file, at most."""


def layout_version(lora_dtype: str) -> int:
    """Raised with every change of pieces or of their places.

    1 counted offsets in elements and knew no spanning pieces; 2 (of floats) and 3 (of codes) knew no embeddings
    and no head.
    """
    return 5 if lora_dtype in CODE_BITS else 4


@dataclass(frozen=True)
class PageShape:
    """The pages an adapter needs: runs of consecutive ones, longest first, then single pages."""

    num_single: int
    runs: tuple[int, ...] = ()

    @cached_property
    def num_pages(self) -> int:
        return self.num_single + sum(self.runs)


@dataclass(frozen=True)
class Placement:
    """The places of pieces. offsets: bytes from the start of the adapter's pages, as if these lay one after another.

    fill: bytes used of each page. shape: of the pages.
    """

    offsets: list[int]
    fill: list[int]
    shape: PageShape


@dataclass(frozen=True)
class AdapterLayout:
    """The form that an adapter must have to fit one model, and how it is stored; travels between processes.

    max_rank: of a row. lora_dtype: of all pieces. page_bytes: see `page_bytes_for`. version: see `layout_version`.
    ruled_out: names of sites that the checkpoint's author leaves to no adapter.
    checkpoint: tells the weights that adapters come on top of; empty where they are not known.
    max_pages: of an adapter, which is what the server's tiers in memory hold; 0 where nobody knows.
    """

    sites: ModelSites
    max_rank: int
    lora_dtype: str
    page_bytes: int
    version: int = layout_version("float32")
    ruled_out: tuple[str, ...] = ()
    checkpoint: str = ""
    max_pages: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the arena, in which kernels count offsets."""
        return element_bytes(self.lora_dtype)

    @property
    def code_bits(self) -> int:
        """Bits of a code; 0 where values are stored as floats."""
        return CODE_BITS.get(self.lora_dtype, 0)

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits, different for models with different sites.

        A model with the usual names, without experts, whose modules are all enabled keeps the digits of a time that
        knew nothing else.
        """
        sites = msgspec.to_builtins(self.sites)
        if not self.sites.has_encoder:
            (stack,) = self.sites.stacks
            sites = {
                "layers_name" if field == "stacks" else field: stack.name if field == "stacks" else value
                for field, value in sites.items()
            }
        for field, usual in (("layers_name", LAYERS), ("has_dora", True)):
            if sites.get(field) == usual:
                del sites[field]
        sites["modules"] = [
            {field: value for field, value in module.items() if (field, value) != ("experts", 1)}
            for module in sites["modules"]
        ]
        if not sites["left_out"]:
            del sites["left_out"]
        if self.sites.experts_form == PLAIN_EXPERTS:
            del sites["experts_form"]
        return hashlib.sha256(msgspec.json.encode(sites)).hexdigest()

    def pieces(self, module: WireModule, rank: int, is_dora: bool) -> list[Piece]:
        """A, B and, for DoRA, the magnitude of one row."""
        return stored_pieces(module, rank, is_dora, self.lora_dtype)

    def place(self, pieces: Iterable[Piece]) -> Placement:
        """Places of all pieces of one adapter."""
        return place_pieces([piece.num_bytes for piece in pieces], self.page_bytes)


def adapter_layout(
    sites: ModelSites, max_rank: int, lora_dtype: str, ruled_out: Iterable[str] = (), checkpoint: str = ""
) -> AdapterLayout:
    """The layout of one model's adapters. Raises KeyError for a dtype that is none of `StoredDtype`."""
    page_bytes = page_bytes_for(sites, max_rank, lora_dtype)
    version = layout_version(lora_dtype)
    return AdapterLayout(sites, max_rank, lora_dtype, page_bytes, version, tuple(ruled_out), checkpoint)


def page_bytes_for(sites: ModelSites, max_rank: int, lora_dtype: str) -> int:
    """The largest page among the sizes that waste least: whole 4 KiB, from 256 KiB to 8 MiB.

    An adapter loses the end of its last page, half a page on average, and the rests that pieces leave in other pages.
    Sizes of linears are mostly multiples of each other, so a page of the size of a piece leaves hardly any rests, and
    the sizes of legal pieces are the candidates; where a piece is larger than 8 MiB, powers of two are candidates, too.
    Sizes remain with which an adapter of `max_rank` on every site takes at most 1 % more than with the best of them.

    So 7 sites a layer have the page that holds their largest piece: 3.5 MiB for an 8B Llama (bfloat16, rank 64: B of
    the fused gate and up). B of its head is 15.7 MiB (128,256 tokens) and spans 5 such pages. Pages of 15.7 MiB instead
    would cost an adapter of rank 8 on all other linears (40 MiB) 17 %. A copy of 256 KiB already runs at the full speed
    of memory and of the bus, so small pages cost no time.
    """
    pieces = chain.from_iterable(stored_pieces(module, max_rank, True, lora_dtype) for module in sites.modules)
    sizes = {piece.num_bytes for piece in pieces}
    candidates = {_page_of(size) for size in sizes if size <= MAX_PAGE_BYTES}
    if max(sizes) > MAX_PAGE_BYTES:
        candidates.update(MIN_PAGE_BYTES << n for n in range((MAX_PAGE_BYTES // MIN_PAGE_BYTES).bit_length()))
    taken = {page: _bytes_taken(sites, max_rank, lora_dtype, page) for page in candidates}
    return max(page for page in candidates if taken[page] <= 1.01 * min(taken.values()))


def _page_of(piece_bytes: int) -> int:
    """The smallest page that holds a piece."""
    return round_up(max(piece_bytes, MIN_PAGE_BYTES), PAGE_UNIT_BYTES)


def _bytes_taken(sites: ModelSites, rank: int, lora_dtype: str, page_bytes: int) -> int:
    """Bytes of an adapter of one rank on every site, in pages of a given size."""
    pieces = uniform_pieces(sites.plain_modules, rank, False, lora_dtype)
    return place_pieces([piece.num_bytes for piece in pieces], page_bytes).shape.num_pages * page_bytes


def uniform_pieces(modules: Iterable[WireModule], rank: int, is_dora: bool, lora_dtype: str) -> list[Piece]:
    """The pieces of an adapter of one rank on `modules` and on all of their experts, which have no DoRA."""
    pieces: list[Piece] = []
    for module in modules:
        pieces += stored_pieces(module, rank, is_dora and module.experts == 1, lora_dtype) * module.experts
    return pieces


def num_values(module: WireModule, rank: int, is_dora: bool = False) -> int:
    """Values of a row of `lora_weights`, without its padding."""
    return module.experts * rank * (module.in_size + module.out_size) + (module.out_size if is_dora else 0)


def place_pieces(sizes: Sequence[int], page_bytes: int) -> Placement:
    """Place pieces of the given bytes; see the head of this file."""
    offsets = [0] * len(sizes)
    fill: list[int] = []
    runs: list[int] = []
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    for size, group in groupby(order, key=lambda index: round_up(sizes[index], ALIGNMENT_BYTES)):
        if size > page_bytes:
            for index in group:
                offsets[index] = len(fill) * page_bytes
                runs.append(num_run_pages(size, page_bytes))
                fill += [page_bytes] * (runs[-1] - 1) + [size - (runs[-1] - 1) * page_bytes]
            continue
        waiting, page = list(group), 0
        first = 0  # in `waiting`: thousands of experts have pieces of one size
        while first < len(waiting):
            if page == len(fill):
                fill.append(0)
            count = min((page_bytes - fill[page]) // size, len(waiting) - first)
            start = page * page_bytes + fill[page]
            for place, index in enumerate(waiting[first : first + count]):
                offsets[index] = start + place * size
            fill[page] += count * size
            first, page = first + count, page + 1
    return Placement(offsets, fill, PageShape(len(fill) - sum(runs), tuple(runs)))


def num_run_pages(piece_bytes: int, page_bytes: int) -> int:
    """Consecutive pages that a spanning piece takes."""
    return -(-piece_bytes // page_bytes)


def uniform_shape(
    layout: AdapterLayout, rank: int, is_dora: bool = False, modules: Iterable[WireModule] | None = None
) -> PageShape:
    """The pages of an adapter of one rank on `modules` and their experts, by default on every site of the model."""
    chosen = layout.sites.plain_modules if modules is None else modules
    return layout.place(uniform_pieces(chosen, rank, is_dora, layout.lora_dtype)).shape


def adapter_pages(layout: AdapterLayout, rank: int, is_dora: bool = False) -> int:
    """How many pages `uniform_shape` has, on every site of the model."""
    return uniform_shape(layout, rank, is_dora).num_pages


def whole_pages(layout: AdapterLayout, rank: int) -> int:
    """How many pages an adapter of one rank on every linear, the embeddings and the head takes."""
    outer = (module for module in layout.sites.outer_modules if module.kind != "rows")
    return uniform_shape(layout, rank, modules=(*layout.sites.plain_modules, *outer)).num_pages


def header_pages(layout: AdapterLayout) -> int:
    """Pages that are more than the header of an adapter's file, which names every row."""
    return 1 + layout.sites.num_columns * _ROW_BYTES // layout.page_bytes


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit
