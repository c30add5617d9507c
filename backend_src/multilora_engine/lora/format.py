"""The wire format of adapters, its validation, and the packed form that every tier stores.

On the wire (TensorRT-LLM's Triton backend, `tensorrt_llm/lora_manager.py` and `examples/hf_lora_convert.py`) an adapter
is two tensors. Row i of `lora_weights` is A `[rank, in]` row-major, then B `[out, rank]` row-major, then, for DoRA, the
normalised magnitude `[out]`, then zeros up to the widest row. Row i of `lora_config` describes it: `[module_id,
layer, rank]` or `[module_id, layer, rank, is_dora]`. The scaling alpha / rank is already in B.

Packed, the same rows lie without their padding in pages of one fixed size, at the places that `multilora_wire.layout`
gives their pieces, so that any tier can hand out and take back pages without ever compacting. Where adapters are stored
as codes, they become codes here, the B of a module of several sites by itself for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.layout import PackedAdapter, PackedRow
from multilora_engine.lora_config import ADAPTER_RANK_LIMIT
from multilora_kernels.adapter_quantization import quantize_a, quantize_b
from multilora_wire.layout import ALIGNMENT_BYTES, AdapterLayout, num_values, round_up
from multilora_wire.pieces import Piece, part_bounds
from multilora_wire.sites import WireModule

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ARENA_DTYPES = TORCH_DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
"""The dtypes in which the kernels see the pages, by `lora_dtype`; pairs of codes of 4 bits are bytes."""

_WRONG_MODEL = "The adapter was made for a model of other sizes, or the declared rank or module is wrong"

_DIGEST_BYTES = 16
_INTEGERS = {2: torch.uint16, 4: torch.uint32}


def pack_adapter(weights: torch.Tensor, config: torch.Tensor, layout: AdapterLayout) -> PackedAdapter:
    """Validate an adapter's wire tensors and pack them; everything kept is copied out of the inputs.

    weights: [rows, width], float16, bfloat16 or float32. config: [rows, 3 or 4], int32.
    Raises InvalidRequest, naming row, module and layer with expected and actual numbers.
    """
    _check_shapes(weights, config)
    rows = _check_rows(config.tolist(), weights.shape[1], layout)
    placement = layout.place(piece for row in rows for piece in row.pieces)
    offsets = iter(placement.offsets)
    packed = [_packed_row(row, offsets) for row in rows]
    # NumPy asks the system for huge pages: with small ones, finding the memory takes longer than filling it.
    pages = torch.from_numpy(np.empty((len(placement.fill), layout.page_bytes), dtype=np.uint8))
    for page, used in zip(pages, placement.fill, strict=True):
        page[used:].zero_()
    if layout.code_bits:
        digest = _fill_codes(pages.view(-1), weights.contiguous(), rows, packed, layout)
        return PackedAdapter(digest, packed, pages)
    values = pages.view(TORCH_DTYPES[layout.lora_dtype])
    _fill(values.view(-1), weights.contiguous(), rows, packed)
    if not _is_finite(values):
        raise InvalidRequest(_describe_non_finite(weights, rows, layout))
    return PackedAdapter(content_digest(packed, pages, layout.lora_dtype), packed, pages)


def ranks_of(rows: Iterable[PackedRow]) -> tuple[int, ...]:
    """The different ranks, ascending."""
    return tuple(sorted({row.rank for row in rows}))


def any_dora(rows: Iterable[PackedRow]) -> bool:
    """Whether a row is DoRA."""
    return any(row.is_dora for row in rows)


def check_rows(rows: Sequence[PackedRow], num_pages: int, layout: AdapterLayout) -> None:
    """Whether stored rows fit the model and lie where packing puts them. Raises ValueError."""
    if not rows:
        raise ValueError("there are no rows")
    for row in rows:
        if (row.layer, row.module_id) not in layout.sites.module_at or not 1 <= row.rank <= layout.max_rank:
            raise ValueError(f"{row} does not fit the model")
        if names := _ruled_out(layout.sites.module_at[row.layer, row.module_id], layout):
            raise ValueError(f"{row} adapts {names}, which the checkpoint rules out")
    placement = layout.place(piece for row in rows for piece in _pieces_of(row, layout))
    offsets = iter(placement.offsets)
    for row in rows:
        if row.offsets != [next(offsets) for _ in row.offsets] or row.magnitude_offset < -1:
            raise ValueError(f"{row} does not lie where packing puts it")
    if len(placement.fill) != num_pages:
        raise ValueError(f"the rows take {len(placement.fill)} pages, not {num_pages}")


def _pieces_of(row: PackedRow, layout: AdapterLayout) -> list[Piece]:
    return layout.pieces(layout.sites.module_at[row.layer, row.module_id], row.rank, row.is_dora)


@dataclass(frozen=True)
class _WireRow:
    """A validated row of `lora_config`. index: its place in the wire tensors. num_values: without its padding."""

    index: int
    module: WireModule
    rank: int
    is_dora: bool
    num_values: int
    pieces: list[Piece]

    def __str__(self) -> str:
        return f"lora_config row {self.index} ({self.module.name}, layer {self.module.layer}, rank {self.rank})"


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
    """The rows sorted by layer and module, each legal by itself and no two writing the same site."""
    rows = [_check_row(index, values, width, layout) for index, values in enumerate(config)]
    rows.sort(key=lambda row: (row.module.layer, row.module.module_id))
    owner: dict[int, _WireRow] = {}
    for row in rows:
        for part in row.module.parts:
            other = owner.setdefault(part.column, row)
            if other is not row:
                name = layout.sites.site_at[part.column].name
                raise InvalidRequest(f"{row} and {other} both adapt {name}; send each once")
    return rows


def _check_row(index: int, values: list[int], width: int, layout: AdapterLayout) -> _WireRow:
    where, rank = f"lora_config row {index}", values[2]
    module = _check_module(where, values[0], values[1], layout)
    check_rank(where, rank, layout)
    if len(values) == 4 and values[3] not in (0, 1):
        raise InvalidRequest(f"{where}: is_dora must be 0 or 1, it is {values[3]}")
    is_dora = len(values) == 4 and values[3] == 1
    needed = num_values(module, rank, is_dora)
    row = _WireRow(index, module, rank, is_dora, needed, layout.pieces(module, rank, is_dora))
    if needed > width:
        raise InvalidRequest(
            f"{row}: lora_weights has to few values for {module.name}: its A is [{rank}, {module.in_size}] and its B "
            f"[{module.out_size}, {rank}] here, {needed} values needed, the rows hold {width}. {_WRONG_MODEL}"
        )
    return row


def check_rank(where: str, rank: int, layout: AdapterLayout) -> None:
    """Raises InvalidRequest for a rank that this server does not accept. where: what has it."""
    if rank <= 0:
        raise InvalidRequest(f"{where}: Expected adapterSize to be > 0, it is {rank}")
    if rank > layout.max_rank:
        raise InvalidRequest(
            f"{where}: Invalid low_rank ({rank}). low_rank must be <= max_lora_rank ({layout.max_rank}); "
            f"{_rank_advice(rank)}"
        )


def _rank_advice(rank: int) -> str:
    if rank <= ADAPTER_RANK_LIMIT:
        return f"start the server with --set max_lora_rank={rank}"
    return f"{ADAPTER_RANK_LIMIT} is the most that a server can be started with"


def _check_module(where: str, module_id: int, layer: int, layout: AdapterLayout) -> WireModule:
    sites = layout.sites
    if module_id not in sites.module_names:
        known = ", ".join(f"{number} {name}" for number, name in sites.module_names.items())
        raise InvalidRequest(f"{where}: lora module {module_id} not enabled for this model; it has {known}")
    if not 0 <= layer < sites.num_layers:
        raise InvalidRequest(
            f"{where}: Expected layerId to be in the range [0, numModelLayers): {layer}, numModelLayers is "
            f"{sites.num_layers}"
        )
    module = sites.module_at.get((layer, module_id))
    if module is None:
        raise InvalidRequest(
            f"{where}: lora module {module_id} ({sites.module_names[module_id]}) not enabled for layer {layer}"
        )
    if names := _ruled_out(module, layout):
        raise InvalidRequest(
            f"{where}: lora module {module_id} ({module.name}) of layer {layer} adapts {names}, ruled out by "
            "lora_compatible or lora_target_modules of the checkpoint"
        )
    return module


def _ruled_out(module: WireModule, layout: AdapterLayout) -> str:
    """The sites of a module that the checkpoint leaves to no adapter; "" where there are none."""
    if not layout.ruled_out:
        return ""
    names = [layout.sites.site_at[part.column].name for part in module.parts]
    return ", ".join(name for name in names if name in layout.ruled_out)


def _fill(values: torch.Tensor, weights: torch.Tensor, rows: Sequence[_WireRow], places: Sequence[PackedRow]) -> None:
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
        for piece, offset in zip(row.pieces, place.offsets, strict=True):
            first, size = offset // values.itemsize, piece.num_values
            target[first : first + size] = source[start : start + size]
            target[first + size : (offset + round_up(piece.num_bytes, ALIGNMENT_BYTES)) // values.itemsize] = 0
            start += size


def _fill_codes(
    target: torch.Tensor,
    weights: torch.Tensor,
    rows: Sequence[_WireRow],
    places: Sequence[PackedRow],
    layout: AdapterLayout,
) -> str:
    """Fill `target`, uint8, as `_fill` does, but with codes; the digest of the weights as they were sent."""
    digest, wire = blake3(b"sent"), _bits(weights)
    for row, place in zip(rows, places, strict=True):
        _check_rest(row, weights[row.index], wire[row.index])
        values = weights[row.index, : row.num_values]
        if not _is_finite(values):
            raise InvalidRequest(_describe_non_finite(weights, rows, layout))
        values = values.float()
        digest.update(np.array([row.module.module_id, row.module.layer, row.rank, row.is_dora], np.int64).tobytes())
        digest.update(values.numpy().view(np.uint8).data)
        for stored, offset in zip(
            _stored_row(row, values, ARENA_DTYPES[layout.lora_dtype]), place.offsets, strict=True
        ):
            target[offset : offset + len(stored)] = stored
            target[offset + len(stored) : offset + round_up(len(stored), ALIGNMENT_BYTES)] = 0
    return digest.hexdigest(_DIGEST_BYTES)


def _stored_row(row: _WireRow, values: torch.Tensor, arena: torch.dtype) -> list[torch.Tensor]:
    """The bytes of A, B and, for DoRA, the magnitude. values: float32, of the row without its padding."""
    a, b, *magnitude = values.split([piece.num_values for piece in row.pieces])
    b = b.view(row.module.out_size, row.rank)
    parts = [quantize_b(b[start:end], arena) for start, end in pairwise(part_bounds(row.module))]
    return [quantize_a(a.view(row.rank, -1), arena), torch.cat(parts), *(m.view(torch.uint8) for m in magnitude)]


def _check_rest(row: _WireRow, values: torch.Tensor, bits: npt.NDArray[Any]) -> None:
    """Raises InvalidRequest when anything but zeros follows the values of a row. `bits` are those of `values`."""
    if bits[row.num_values :].max(initial=0) and values[row.num_values :].any():  # a zero may be negative
        raise InvalidRequest(
            f"{row}: lora_weights holds values other than zero beyond the {row.num_values} that its module and "
            f"rank account for. {_WRONG_MODEL}"
        )


def _packed_row(row: _WireRow, offsets: Iterator[int]) -> PackedRow:
    """offsets: of the pieces of this row and of later rows."""
    a_offset, b_offset = next(offsets), next(offsets)
    magnitude_offset = next(offsets) if row.is_dora else -1
    return PackedRow(row.module.module_id, row.module.layer, row.rank, a_offset, b_offset, magnitude_offset)


def content_digest(rows: Sequence[PackedRow], pages: Iterable[torch.Tensor], lora_dtype: str) -> str:
    """32 hex digits (BLAKE3, cut) over an adapter's rows and pages; the GIL is free meanwhile.

    Offsets count in elements of the arena, as in every earlier layout, so that digests outlive layouts.
    """
    itemsize = ARENA_DTYPES[lora_dtype].itemsize
    header = np.array([(r.module_id, r.layer, r.rank, *(o // itemsize for o in _all_offsets(r))) for r in rows])
    digest = blake3(lora_dtype.encode())
    digest.update(header.astype(np.int64).tobytes())
    for page in pages:
        digest.update(page.numpy().data)
    return digest.hexdigest(_DIGEST_BYTES)


def _all_offsets(row: PackedRow) -> tuple[int, int, int]:
    return row.a_offset, row.b_offset, row.magnitude_offset


def _bits(values: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory as unsigned integers: NumPy has no bfloat16, and finds their largest at memory speed."""
    return values.view(_INTEGERS[values.itemsize]).numpy()


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite, by their bits: as integers, infinities and NaNs are the largest of their sign.

    Positive ones are the largest signed integers, negative ones the largest unsigned.
    """
    bits, infinity = _bits(values), torch.tensor(torch.inf, dtype=values.dtype)
    signed = bits.view(f"i{values.itemsize}")
    return bool(signed.max() < _bits(infinity) and bits.max() < _bits(-infinity))


def _describe_non_finite(weights: torch.Tensor, rows: Sequence[_WireRow], layout: AdapterLayout) -> str:
    """The message about an adapter that was packed into values that are not finite."""
    places = torch.nonzero(~torch.isfinite(weights))
    if len(places) == 0:
        return f"lora_weights holds values beyond the range of lora_dtype {layout.lora_dtype}"
    index, column = places[0].tolist()
    row = next(row for row in rows if row.index == index)
    return (
        f"{row}: lora_weights holds {weights[index, column].item()} at position {column}; only finite values are legal"
    )
