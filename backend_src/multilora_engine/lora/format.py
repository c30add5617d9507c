"""The wire format of adapters, its validation, and the packed form that every tier stores.

On the wire (TensorRT-LLM's Triton backend, `tensorrt_llm/lora_manager.py` and `examples/hf_lora_convert.py`) an adapter
is two tensors. Row i of `lora_weights` is A `[rank, in]` row-major, then B `[out, rank]` row-major, then, for DoRA, the
normalised magnitude `[out]`, then zeros up to the widest row. Row i of `lora_config` says what it is: `[module_id,
layer, rank]` or `[module_id, layer, rank, is_dora]`. The scaling alpha / rank is already in B.

Packed, the same rows lie without their padding in pages of one fixed size, so that any tier can hand out and take back
pages without ever compacting. A row never straddles a page; A, B and magnitude start on 64-byte boundaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from multilora_engine.errors import InvalidRequest
from multilora_engine.models.model_config import ModelConfig

SLICES = ("q", "k", "v", "o", "gate", "up", "down")
"""The outputs of one layer's linears, in the order of the columns of `LoRATables`: column = layer * 7 + slice."""

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ALIGNMENT_BYTES = 64
_MIN_PAGE_BYTES = 256 * 1024


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

    def num_values(self, rank: int, is_dora: bool) -> int:
        return rank * (self.in_size + self.out_size) + (self.out_size if is_dora else 0)


@dataclass(frozen=True)
class PackedRow:
    """One (module, layer) of an adapter. Offsets are elements of `lora_dtype` inside page `page` of the adapter."""

    module_id: int
    layer: int
    rank: int
    page: int
    a_offset: int
    b_offset: int
    magnitude_offset: int
    """-1 without DoRA."""


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
    """The layout of one model's adapters; a page holds the largest row that can be legal, and 256 KiB at least."""
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
    largest = max(_row_extent(module, max_rank, True, itemsize)[-1] for module in lora_modules(sizes).values())
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


def adapter_pages(layout: AdapterLayout, rank: int) -> int:
    """Pages of an adapter of one rank on every linear of every layer, DoRA magnitudes included."""
    itemsize = layout.torch_dtype.itemsize
    modules = lora_modules(layout)
    one_layer = [_row_extent(modules[i], rank, True, itemsize)[-1] for i in (1, 2, 3, 4, 5, 6, 7)]
    return len(_first_fit(one_layer * layout.num_layers, layout.page_bytes // itemsize)[1])


def pack_adapter(weights: torch.Tensor, config: torch.Tensor, layout: AdapterLayout) -> PackedAdapter:
    """Validate an adapter's wire tensors and pack them; everything kept is copied out of the inputs.

    weights: [rows, width], float16, bfloat16 or float32. config: [rows, 3 or 4], int32.
    Raises InvalidRequest, naming row, module and layer with expected and actual numbers.
    """
    _check_shapes(weights, config)
    rows = _check_rows(config.tolist(), weights.shape[1], layout)
    if not bool(torch.isfinite(weights).all()):
        raise InvalidRequest(_first_non_finite(weights, rows))
    return _pack(weights, rows, layout)


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


def _pack(weights: torch.Tensor, rows: Sequence[_WireRow], layout: AdapterLayout) -> PackedAdapter:
    dtype = layout.torch_dtype
    extents = [_row_extent(row.module, row.rank, row.is_dora, dtype.itemsize) for row in rows]
    places, page_fill = _first_fit([extent[-1] for extent in extents], layout.page_bytes // dtype.itemsize)
    values = torch.zeros(len(page_fill), layout.page_bytes // dtype.itemsize, dtype=dtype)
    packed = []
    for row, (b_offset, magnitude_offset, _), (page, start) in zip(rows, extents, places, strict=True):
        a_size, b_size = row.rank * row.module.in_size, row.rank * row.module.out_size
        source, target = weights[row.index], values[page, start:]
        target[:a_size].copy_(source[:a_size])
        target[b_offset : b_offset + b_size].copy_(source[a_size : a_size + b_size])
        if row.is_dora:
            target[magnitude_offset : magnitude_offset + row.module.out_size].copy_(
                source[a_size + b_size : row.num_values]
            )
        if bool(source[row.num_values :].any()):
            raise InvalidRequest(
                f"{row}: lora_weights holds values other than zero beyond the {row.num_values} that its module and "
                "rank account for; the declared rank or module is wrong"
            )
        packed.append(
            PackedRow(
                module_id=row.module.module_id,
                layer=row.layer,
                rank=row.rank,
                page=page,
                a_offset=start,
                b_offset=start + b_offset,
                magnitude_offset=start + magnitude_offset if row.is_dora else -1,
            )
        )
    if weights.dtype != dtype and not bool(torch.isfinite(values).all()):
        raise InvalidRequest(f"lora_weights holds values beyond the range of lora_dtype {layout.lora_dtype}")
    pages = values.view(torch.uint8)
    return PackedAdapter(_digest(packed, pages, layout.lora_dtype), packed, pages)


def _row_extent(module: LoRAModule, rank: int, is_dora: bool, itemsize: int) -> tuple[int, int, int]:
    """Elements from the start of a row to its B, to its magnitude, and to its end, all 64-byte aligned."""
    unit = _ALIGNMENT_BYTES // itemsize
    b_offset = _round_up(rank * module.in_size, unit)
    magnitude_offset = b_offset + _round_up(rank * module.out_size, unit)
    return b_offset, magnitude_offset, magnitude_offset + (_round_up(module.out_size, unit) if is_dora else 0)


def _first_fit(sizes: Sequence[int], capacity: int) -> tuple[list[tuple[int, int]], list[int]]:
    """First-fit decreasing: (page, offset) of each size in the given order, and how full each page is."""
    places = [(0, 0)] * len(sizes)
    fill: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        page = next((p for p, used in enumerate(fill) if used + size <= capacity), len(fill))
        if page == len(fill):
            fill.append(0)
        places[index] = (page, fill[page])
        fill[page] += size
    return places, fill


def _digest(rows: Sequence[PackedRow], pages: torch.Tensor, lora_dtype: str) -> str:
    header = np.array(
        [(r.module_id, r.layer, r.rank, r.page, r.a_offset, r.b_offset, r.magnitude_offset) for r in rows], np.int64
    )
    digest = hashlib.blake2b(lora_dtype.encode(), digest_size=16)
    digest.update(header.tobytes())
    digest.update(pages.numpy().data)
    return digest.hexdigest()


def _first_non_finite(weights: torch.Tensor, rows: Sequence[_WireRow]) -> str:
    index, column = (int(i) for i in torch.nonzero(~torch.isfinite(weights))[0])
    row = next(row for row in rows if row.index == index)
    return (
        f"{row}: lora_weights holds {weights[index, column].item()} at position {column}; only finite values are legal"
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
