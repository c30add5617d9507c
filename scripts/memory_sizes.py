"""Computes how many adapters have room beside a quantised 8B model and its KV cache, by their linears and type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
import typer

from adapter_sizes import EIGHT_BILLION, MAX_RANK, RANK
from marked_tables import write_table
from multilora_client.sizing import choose_linears, linear_names
from multilora_engine.models.kv_groups import KVGroup
from multilora_kernels import CodeType, QuantizedWeight
from multilora_wire.layout import adapter_layout, uniform_shape
from multilora_wire.pieces import StoredDtype
from plots import DOCS
from sources import command_source

PAGE = DOCS / "models.md"
TABLE = "memory sizes"
MEMORY_BYTES = 24 << 30
PROCESS_BYTES = 1 << 30
"""Left to the processes, beside weights, KV cache and adapters."""

NUM_TOKENS, NUM_ADAPTERS = 32_768, 1000
HIDDEN_SIZE, VOCABULARY = 4096, 128_256
KV_GROUP = KVGroup(num_layers=32, num_kv_heads=8, head_dim=128)
KINDS: tuple[tuple[str, StoredDtype], ...] = (
    ("all", "bfloat16"),
    ("all", "int8"),
    ("all", "int4"),
    ("q,k,v,o", "int8"),
    ("q,k,v,o", "int4"),
    ("q,v", "int8"),
)
"""Adapters of the table: their linears, and how they are stored."""

SCHEMES: dict[str, tuple[CodeType, int | None]] = {"w4a16": (CodeType.INT4, 128), "w8a16": (CodeType.INT8, None)}
"""Codes of the layers' linears, and inputs that share a scale, None for all, as `multilora quantize` writes them."""


def weight_bytes(scheme: str) -> int:
    """Bytes of the codes and scales of all linears, of the head and of the embeddings, these two in 8 bits."""
    code_type, group_size = SCHEMES[scheme]
    shapes = [(site.out_size, site.in_size) for site in EIGHT_BILLION.sites]
    layers = sum(_coded_bytes(*shape, code_type, group_size) for shape in shapes)
    return layers + 2 * _coded_bytes(VOCABULARY, HIDDEN_SIZE, CodeType.INT8, None)


def kv_bytes() -> int:
    """Bytes of the keys and values of NUM_TOKENS tokens in int8."""
    return NUM_TOKENS * KV_GROUP.bytes_per_token(torch.int8)


def adapter_bytes(linears: str, dtype: StoredDtype) -> int:
    """Bytes of the pages of an adapter of RANK on these linears of each layer."""
    layout = adapter_layout(EIGHT_BILLION, MAX_RANK, dtype)
    names = ",".join(linear_names(layout)) if linears == "all" else linears
    return uniform_shape(layout, RANK, modules=choose_linears(layout, names)).num_pages * layout.page_bytes


def room_for_adapters(scheme: str, linears: str, dtype: StoredDtype) -> int:
    """The adapters that have room in MEMORY_BYTES beside everything else."""
    left = MEMORY_BYTES - PROCESS_BYTES - weight_bytes(scheme) - kv_bytes()
    return left // adapter_bytes(linears, dtype)


def sizes_table() -> str:
    """A row for each kind of adapters; a column for each scheme tells how many have room."""
    schemes = [f"beside {scheme}, {_gibibytes(weight_bytes(scheme))}" for scheme in SCHEMES]
    headings = [f"rank {RANK} on", "stored as", "an adapter", f"{NUM_ADAPTERS:,} adapters", *schemes]
    lines = [f"| {' | '.join(headings)} |", f"| --- | --- |{' ---: |' * (len(headings) - 2)}"]
    return "\n".join([*lines, *_rows()]) + "\n"


def _rows() -> Iterator[str]:
    for linears, dtype in KINDS:
        size = adapter_bytes(linears, dtype)
        rooms = [f"{room_for_adapters(scheme, linears, dtype):,}" for scheme in SCHEMES]
        names = "all linear layers" if linears == "all" else linears.replace(",", ", ")
        cells = [names, dtype, f"{size / (1 << 20):.1f} MiB", _gibibytes(NUM_ADAPTERS * size), *rooms]
        yield f"| {' | '.join(cells)} |"


def _coded_bytes(out_features: int, in_features: int, code_type: CodeType, group_size: int | None) -> int:
    """Of a weight on the device `meta`, which takes no memory."""
    inputs, nowhere = group_size or in_features, torch.device("meta")
    weight = QuantizedWeight(out_features, in_features, code_type, inputs, torch.bfloat16, nowhere)
    return weight.nbytes


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def main(
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/models.md.")] = False,
) -> None:
    """Print how many adapters have room in 24 GiB beside an 8B model, which is computed and needs no model."""
    table = sizes_table()
    others = f"Keys and values take {_gibibytes(kv_bytes())}."
    print(f"{table}{others}")
    if update_docs:
        write_table(PAGE, TABLE, table, f"{command_source()} {others}")
