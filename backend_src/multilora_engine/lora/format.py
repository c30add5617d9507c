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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.layout import AdapterLayout, LoRAModule, PackedAdapter, PackedRow, lora_modules, round_up

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ALIGNMENT_BYTES = 64
_DIGEST_BYTES = 16
_INTEGERS = {2: torch.uint16, 4: torch.uint32}


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
    values = pages.view(TORCH_DTYPES[layout.lora_dtype])
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
    return round_up(num_elements, _ALIGNMENT_BYTES // layout.itemsize)
