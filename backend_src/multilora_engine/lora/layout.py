"""What an adapter must look like to fit a model, and where its parts lie once it is packed: numbers, no weights.

In a module of its own, without torch: importing that costs a front more than a second and 100 MB, and not every front
handles weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from multilora_engine.models.model_config import ModelConfig

SLICES = ("q", "k", "v", "o", "gate", "up", "down")
"""The outputs of one layer's linears, in the order of the columns of `LoRATables`: column = layer * 7 + slice."""

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
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
    def itemsize(self) -> int:
        """Bytes of a value."""
        return _ITEMSIZES[self.lora_dtype]

    @property
    def page_elements(self) -> int:
        return self.page_bytes // self.itemsize

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
    largest = max(size for module in lora_modules(sizes).values() for size in module.piece_sizes(max_rank, True))
    page_bytes = round_up(max(largest * sizes.itemsize, _MIN_PAGE_BYTES), 4096)
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


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
