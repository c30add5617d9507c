"""The wire format of adapters, its validation, and the packed form that every tier stores.

On the wire (TensorRT-LLM's Triton backend, `tensorrt_llm/lora_manager.py` and `examples/hf_lora_convert.py`) an adapter
is two tensors. Row i of `lora_weights` is A `[rank, in]` row-major, then B `[out, rank]` row-major, then, for DoRA, the
normalised magnitude `[out]`, then zeros up to the widest row. Row i of `lora_config` says what it is: `[module_id,
layer, rank]` or `[module_id, layer, rank, is_dora]`. The scaling alpha / rank is already in B.

Packed, the same rows lie without their padding in pages of one fixed size, so that any tier can hand out and take back
pages without ever compacting. Each A, B and magnitude is a *piece*: it starts on a 64-byte boundary and never straddles
a page, but the pieces of one row may lie in different pages. So a page need only hold the largest single piece, and
little of an adapter's last page is wasted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from multilora_engine.errors import InvalidRequest
from multilora_engine.models.model_config import ModelConfig

SLICES = ("q", "k", "v", "o", "gate", "up", "down")
"""The outputs of one layer's linears, in the order of the columns of `LoRATables`: column = layer * 7 + slice."""

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ALIGNMENT_BYTES = 64
_MIN_PAGE_BYTES = 256 * 1024
_DIGEST_BYTES = 16
_INTEGERS = {2: torch.uint16, 4: torch.uint32}


@dataclass(frozen=True)
class AdapterLayout:
    """What an adapter must look like to fit one model: plain ints and strings, so that it travels between processes."""

    num_layers: int
    hidden_size: int
    q_size: int
    kv_size: int
    intermediate_size: int
    max_rank: int
    lora_dtype: str
    page_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.lora_dtype]

    @property
    def page_elements(self) -> int:
        return self.page_bytes // self.torch_dtype.itemsize

    @property
    def num_columns(self) -> int:
        return self.num_layers * len(SLICES)


@dataclass(frozen=True)
class LoRAModule:
    """A module id of the wire format: its linear's sizes, and where its output slices start (rows of B)."""

    module_id: int
    name: str
    in_size: int
    out_size: int
    slice_starts: tuple[tuple[str, int], ...]

    def piece_sizes(self, rank: int, is_dora: bool) -> list[int]:
        """Elements of A, B and, for DoRA, the magnitude."""
        return [rank * self.in_size, rank * self.out_size] + ([self.out_size] if is_dora else [])

    def num_values(self, rank: int, is_dora: bool) -> int:
        return sum(self.piece_sizes(rank, is_dora))


@dataclass(frozen=True)
class PackedRow:
    """One (module, layer) of an adapter.

    Offsets are elements of `lora_dtype` from the start of the adapter's own pages, as if these lay one behind another:
    page `offset // page_elements`, place `offset % page_elements`.
    """

    module_id: int
    layer: int
    rank: int
    a_offset: int
    b_offset: int
    magnitude_offset: int
    """-1 without DoRA."""

    @property
    def offsets(self) -> list[int]:
        """Of its pieces: A, B and, for DoRA, the magnitude."""
        offsets = [self.a_offset, self.b_offset, self.magnitude_offset]
        return offsets[:2] if self.magnitude_offset == -1 else offsets


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter in packed form, rows sorted by layer and module.

    digest: 32 hex digits over rows and pages: equal for the same adapter in whatever row order, row width or
        wire dtype (of the same values) it was sent.
    pages: uint8 [num_pages, page_bytes]; what no row covers is zero.
    """

    digest: str
    rows: list[PackedRow]
    pages: torch.Tensor


def adapter_layout(model: ModelConfig, max_rank: int, lora_dtype: str) -> AdapterLayout:
    """The layout of one model's adapters; a page holds the largest piece that can be legal, and 256 KiB at least."""
    sizes = AdapterLayout(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        q_size=model.q_size,
        kv_size=model.kv_size,
        intermediate_size=model.intermediate_size,
        max_rank=max_rank,
        lora_dtype=lora_dtype,
        page_bytes=0,
    )
    itemsize = TORCH_DTYPES[lora_dtype].itemsize
    largest = max(size for module in lora_modules(sizes).values() for size in module.piece_sizes(max_rank, True))
    page_bytes = _round_up(max(largest * itemsize, _MIN_PAGE_BYTES), 4096)
    return AdapterLayout(**{**sizes.__dict__, "page_bytes": page_bytes})


@cache
def lora_modules(layout: AdapterLayout) -> dict[int, LoRAModule]:
    """The module ids a Llama-family model has.

    Upstream's converter maps `gate_proj` to 5 (`mlp_h_to_4h`) and `up_proj` to 7 (`mlp_gate`), the opposite of what the
    names suggest, and stores the fused `gate_up_proj` (18) with B's halves swapped: up first, then gate.
    """
    hidden, q, kv, ffn = layout.hidden_size, layout.q_size, layout.kv_size, layout.intermediate_size
    modules = (
        LoRAModule(0, "attn_qkv", hidden, q + 2 * kv, (("q", 0), ("k", q), ("v", q + kv))),
        LoRAModule(1, "attn_q", hidden, q, (("q", 0),)),
        LoRAModule(2, "attn_k", hidden, kv, (("k", 0),)),
        LoRAModule(3, "attn_v", hidden, kv, (("v", 0),)),
        LoRAModule(4, "attn_dense", q, hidden, (("o", 0),)),
        LoRAModule(5, "mlp_h_to_4h", hidden, ffn, (("gate", 0),)),
        LoRAModule(6, "mlp_4h_to_h", ffn, hidden, (("down", 0),)),
        LoRAModule(7, "mlp_gate", hidden, ffn, (("up", 0),)),
        LoRAModule(18, "mlp_gate_up", hidden, 2 * ffn, (("up", 0), ("gate", ffn))),
    )
    return {module.module_id: module for module in modules}


def adapter_pages(layout: AdapterLayout, rank: int, is_dora: bool = False) -> int:
    """Pages of an adapter of one rank on every linear of every layer."""
    modules = lora_modules(layout)
    one_layer = [size for i in (1, 2, 3, 4, 5, 6, 7) for size in modules[i].piece_sizes(rank, is_dora)]
    return len(_place_pieces(one_layer * layout.num_layers, layout)[1])


def pack_adapter(weights: torch.Tensor, config: torch.Tensor, layout: AdapterLayout) -> PackedAdapter:
    """Validate an adapter's wire tensors and pack them; everything kept is copied out of the inputs.

    weights: [rows, width], float16, bfloat16 or float32. config: [rows, 3 or 4], int32.
    Raises InvalidRequest, naming row, module and layer with expected and actual numbers.
    """
    _check_shapes(weights, config)
    rows = _check_rows(config.tolist(), weights.shape[1], layout)
    offsets, fill = _place_pieces([size for row in rows for size in row.piece_sizes], layout)
    remaining = iter(offsets)
    packed = [_packed_row(row, remaining) for row in rows]
    # NumPy asks the system for huge pages: with small ones, finding the memory takes longer than all that follows.
    pages = torch.from_numpy(np.empty((len(fill), layout.page_bytes), dtype=np.uint8))
    values = pages.view(layout.torch_dtype)
    for page, used in zip(values, fill, strict=True):
        page[used:].zero_()
    _fill(values.view(-1), weights.contiguous(), rows, packed, layout)
    if not _is_finite(values):
        raise InvalidRequest(_describe_non_finite(weights, rows, layout))
    return PackedAdapter(content_digest(packed, pages, layout.lora_dtype), packed, pages)


def ranks_of(rows: Iterable[PackedRow]) -> tuple[int, ...]:
    """The different ranks, ascending."""
    return tuple(sorted({row.rank for row in rows}))


def check_rows(rows: Sequence[PackedRow], num_pages: int, layout: AdapterLayout) -> None:
    """Whether packed rows that were stored somewhere may address this layout's pages. Raises ValueError."""
    modules = lora_modules(layout)
    if not rows:
        raise ValueError("there are no rows")
    for row in rows:
        if (
            row.module_id not in modules
            or not 0 <= row.layer < layout.num_layers
            or not 1 <= row.rank <= layout.max_rank
        ):
            raise ValueError(f"{row} does not fit the model")
        sizes = modules[row.module_id].piece_sizes(row.rank, is_dora=True)
        for offset, size in zip(row.offsets, sizes, strict=False):
            page, place = divmod(offset, layout.page_elements)
            if not 0 <= page < num_pages or place + size > layout.page_elements:
                raise ValueError(f"{row} leaves its pages")


@dataclass(frozen=True)
class _WireRow:
    """A validated row of `lora_config`, and which row of the wire tensors it is."""

    index: int
    module: LoRAModule
    layer: int
    rank: int
    is_dora: bool

    def __str__(self) -> str:
        return f"lora_config row {self.index} ({self.module.name}, layer {self.layer}, rank {self.rank})"

    @property
    def piece_sizes(self) -> list[int]:
        return self.module.piece_sizes(self.rank, self.is_dora)

    @property
    def num_values(self) -> int:
        return self.module.num_values(self.rank, self.is_dora)


def _check_shapes(weights: torch.Tensor, config: torch.Tensor) -> None:
    if weights.dim() != 2 or weights.shape[0] == 0:
        raise InvalidRequest(f"Invalid shape for lora_weights tensor: {list(weights.shape)}, expected [rows, width]")
    if config.dim() != 2 or config.shape[1] not in (3, 4):
        raise InvalidRequest(f"Invalid shape for lora_config tensor: {list(config.shape)}, expected [rows, 3 or 4]")
    if config.shape[0] != weights.shape[0]:
        raise InvalidRequest(
            f"lora_weights has {weights.shape[0]} rows and lora_config {config.shape[0]}; each row needs both"
        )


def _check_rows(config: list[list[int]], width: int, layout: AdapterLayout) -> list[_WireRow]:
    """The rows sorted by layer and module, each legal by itself and no two writing the same slice."""
    rows = [_check_row(index, values, width, layout) for index, values in enumerate(config)]
    rows.sort(key=lambda row: (row.layer, row.module.module_id))
    owner: dict[tuple[int, str], _WireRow] = {}
    for row in rows:
        for name, _ in row.module.slice_starts:
            other = owner.setdefault((row.layer, name), row)
            if other is not row:
                raise InvalidRequest(f"{row} and {other} both adapt {name} of layer {row.layer}; send each once")
    return rows


def _check_row(index: int, values: list[int], width: int, layout: AdapterLayout) -> _WireRow:
    module_id, layer, rank = values[:3]
    where = f"lora_config row {index}"
    modules = lora_modules(layout)
    if module_id not in modules:
        known = ", ".join(f"{m.module_id} {m.name}" for m in modules.values())
        raise InvalidRequest(f"{where}: lora module {module_id} not enabled for this model; it has {known}")
    if not 0 <= layer < layout.num_layers:
        raise InvalidRequest(
            f"{where}: Expected layerId to be in the range [0, numModelLayers): {layer}, numModelLayers is "
            f"{layout.num_layers}"
        )
    if rank <= 0:
        raise InvalidRequest(f"{where}: Expected adapterSize to be > 0, it is {rank}")
    if rank > layout.max_rank:
        raise InvalidRequest(
            f"{where}: Invalid low_rank ({rank}). low_rank must be <= max_lora_rank ({layout.max_rank})"
        )
    if len(values) == 4 and values[3] not in (0, 1):
        raise InvalidRequest(f"{where}: is_dora must be 0 or 1, it is {values[3]}")
    row = _WireRow(index, modules[module_id], layer, rank, len(values) == 4 and values[3] == 1)
    if row.num_values > width:
        raise InvalidRequest(
            f"{row}: lora_weights has to few values for {row.module.name}: rank x (in + out) is {rank} x "
            f"({row.module.in_size} + {row.module.out_size}), {row.num_values} values needed, the rows hold {width}"
        )
    return row


def _fill(
    values: torch.Tensor,
    weights: torch.Tensor,
    rows: Sequence[_WireRow],
    places: Sequence[PackedRow],
    layout: AdapterLayout,
) -> None:
    """Copy the pieces of all rows to their places in `values`. Raises InvalidRequest for anything behind them.

    Bits are copied, by NumPy: a small copy costs torch several times as much.
    """
    target, wire = _bits(values), _bits(weights)
    for row, place in zip(rows, places, strict=True):
        _check_rest(row, weights[row.index], wire[row.index])
        source = wire[row.index]
        if weights.dtype != values.dtype:
            source = _bits(weights[row.index].to(values.dtype))
        start = 0
        for size, offset in zip(row.piece_sizes, place.offsets, strict=True):
            target[offset : offset + size] = source[start : start + size]
            target[offset + size : offset + _aligned(size, layout)] = 0
            start += size


def _check_rest(row: _WireRow, values: torch.Tensor, bits: npt.NDArray[Any]) -> None:
    """Raises InvalidRequest when anything but zeros follows the values of a row. `bits` are those of `values`."""
    if bits[row.num_values :].max(initial=0) and values[row.num_values :].any():  # a zero may be negative
        raise InvalidRequest(
            f"{row}: lora_weights holds values other than zero beyond the {row.num_values} that its module and "
            "rank account for; the declared rank or module is wrong"
        )


def _packed_row(row: _WireRow, offsets: Iterator[int]) -> PackedRow:
    """offsets: of the pieces of this row and of those behind it."""
    a_offset, b_offset = next(offsets), next(offsets)
    magnitude_offset = next(offsets) if row.is_dora else -1
    return PackedRow(row.module.module_id, row.layer, row.rank, a_offset, b_offset, magnitude_offset)


def _place_pieces(sizes: Sequence[int], layout: AdapterLayout) -> tuple[list[int], list[int]]:
    """Where pieces go, largest first, each into the first page with room: their offsets, and how full each page is."""
    offsets = [0] * len(sizes)
    fill: list[int] = []
    page = last_size = 0
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = _aligned(sizes[index], layout)
        if size != last_size:
            page, last_size = 0, size  # pages without room for one of this size have none for the next either
        while page < len(fill) and fill[page] + size > layout.page_elements:
            page += 1
        if page == len(fill):
            fill.append(0)
        offsets[index] = page * layout.page_elements + fill[page]
        fill[page] += size
    return offsets, fill


def content_digest(rows: Sequence[PackedRow], pages: Iterable[torch.Tensor], lora_dtype: str) -> str:
    """32 hex digits (BLAKE3, cut) over all of an adapter; the GIL is free meanwhile."""
    header = np.array([(r.module_id, r.layer, r.rank, r.a_offset, r.b_offset, r.magnitude_offset) for r in rows])
    digest = blake3(lora_dtype.encode())
    digest.update(header.astype(np.int64).tobytes())
    for page in pages:
        digest.update(page.numpy().data)
    return digest.hexdigest(_DIGEST_BYTES)


def _bits(values: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory as unsigned integers: NumPy has no bfloat16, and finds their largest at memory speed."""
    return values.view(_INTEGERS[values.itemsize]).numpy()


def _is_finite(values: torch.Tensor) -> bool:
    """By the bits: as integers, infinities and NaNs are larger than all else of their sign.

    Positive ones are the largest signed integers, negative ones the largest unsigned.
    """
    bits, infinity = _bits(values), torch.tensor(torch.inf, dtype=values.dtype)
    signed = bits.view(f"i{values.itemsize}")
    return bool(signed.max() < _bits(infinity) and bits.max() < _bits(-infinity))


def _describe_non_finite(weights: torch.Tensor, rows: Sequence[_WireRow], layout: AdapterLayout) -> str:
    """What is wrong with an adapter that was packed into values that are not finite."""
    places = torch.nonzero(~torch.isfinite(weights))
    if len(places) == 0:
        return f"lora_weights holds values beyond the range of lora_dtype {layout.lora_dtype}"
    index, column = places[0].tolist()
    row = next(row for row in rows if row.index == index)
    return (
        f"{row}: lora_weights holds {weights[index, column].item()} at position {column}; only finite values are legal"
    )


def _aligned(num_elements: int, layout: AdapterLayout) -> int:
    return _round_up(num_elements, _ALIGNMENT_BYTES // layout.torch_dtype.itemsize)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
