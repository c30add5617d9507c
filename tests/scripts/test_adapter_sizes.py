"""The table of adapters' sizes is the one that the layout of adapters gives."""

from __future__ import annotations

from pathlib import Path

import pytest

import adapter_sizes
from adapter_sizes import PAGE, TABLE, sizes_table
from marked_tables import read_cells, read_table
from multilora_wire.pieces import CODE_BITS
from plots import number

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "fp8": 8, "int4": 4}
NUM_VALUES = {
    "the default model": 30 * (4 * 576 + 2 * (576 + 192) + 3 * (576 + 1536)),
    "shape of Llama-3.1-8B": 32 * (4 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 14336)),
}
"""in + out, over all linears: the values of an adapter of rank 1."""


def test_the_page_has_the_table_of_today() -> None:
    lines = [line for line in read_table(PAGE, TABLE).splitlines(keepends=True) if line.startswith("|")]
    assert "".join(lines) == sizes_table(), "run scripts/run adapter_sizes --docs"


def test_an_adapter_takes_its_values_and_little_more() -> None:
    for row in read_cells(PAGE, TABLE):
        model, dtype = row["rank 16, all linear layers"].split(", ")
        values = 16 * NUM_VALUES[model] * BITS[dtype] / 8 / 2**20
        # Codes have scales beside them.
        assert values <= number(row["an adapter"]) < values * (1.3 if dtype in CODE_BITS else 1.01)


def test_the_command_writes_the_table_with_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, drawn = tmp_path / "page.md", list[Path]()
    page.write_text(f"<!-- {TABLE}: begin -->\nold\n<!-- {TABLE}: end -->\n")
    monkeypatch.setattr(adapter_sizes, "PAGE", page)
    monkeypatch.setattr(adapter_sizes, "write_plots", drawn.append)
    monkeypatch.setattr("sys.argv", ["scripts/run adapter_sizes", "--docs"])

    adapter_sizes.main(update_docs=True)

    assert read_table(page, TABLE) == f"{sizes_table()}\nBy `scripts/run adapter_sizes --docs`.\n"
    assert drawn == [page]
