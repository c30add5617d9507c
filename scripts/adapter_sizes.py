"""Computes the memory that adapters of rank 16 take, by model and by the type that they are stored in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from checkpoints.prepare_default_model import ensure_default_checkpoint
from marked_tables import write_table
from multilora_client.sizing import read_layout
from multilora_wire.layout import AdapterLayout, adapter_layout, adapter_pages
from multilora_wire.pieces import StoredDtype
from multilora_wire.sites import decoder_sites
from plots import DOCS, write_plots
from sources import command_source

EPILOG = "`multilora adapters size` tells the same of any server, and of any checkpoint."

PAGE = DOCS / "adapters.md"
TABLE = "adapter sizes"
RANK, MAX_RANK, NUM_ADAPTERS = 16, 64, 2000
EIGHT_BILLION = decoder_sites(num_layers=32, hidden_size=4096, q_size=4096, kv_size=1024, intermediate_size=14336)
DTYPES: tuple[StoredDtype, ...] = ("float32", "bfloat16", "int8", "fp8", "int4")


def layouts() -> Iterator[tuple[str, AdapterLayout]]:
    """The models and types of the table, in its order."""
    checkpoint = ensure_default_checkpoint()
    for dtype in DTYPES:
        yield f"the default model, {dtype}", read_layout(checkpoint, MAX_RANK, dtype)
    for dtype in DTYPES[1:]:
        yield f"shape of Llama-3.1-8B, {dtype}", adapter_layout(EIGHT_BILLION, MAX_RANK, dtype)


def sizes_table() -> str:
    """A row for each model and type. The page's plot finds the columns by their order."""
    lines = [
        f"| rank {RANK}, all linear layers | page | an adapter | {NUM_ADAPTERS:,} adapters |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, layout in layouts():
        num_bytes = adapter_pages(layout, RANK) * layout.page_bytes
        total = f"{NUM_ADAPTERS * num_bytes / (1 << 30):.1f} GiB"
        lines.append(f"| {name} | {_page(layout.page_bytes)} | {num_bytes / (1 << 20):.1f} MiB | {total} |")
    return "\n".join(lines) + "\n"


def _page(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes / (1 << 10):g} KiB"


def main(
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table and plot of docs/adapters.md.")] = False,
) -> None:
    """Print the table of adapters' sizes, which is computed and needs no server."""
    table = sizes_table()
    print(table, end="")
    if update_docs:
        write_table(PAGE, TABLE, table, command_source())
        write_plots(PAGE)
