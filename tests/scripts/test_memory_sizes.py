"""The table of what has room beside an 8B model is the one that the sizes of weights, keys and adapters give."""

from __future__ import annotations

from pathlib import Path

import pytest

import memory_sizes
from marked_tables import read_cells, read_table
from memory_sizes import PAGE, TABLE, adapter_bytes, kv_bytes, room_for_adapters, sizes_table, weight_bytes
from plots import number

HIDDEN, KV, MLP, LAYERS, VOCABULARY = 4096, 1024, 14336, 32, 128_256
OUTPUTS = 2 * HIDDEN + 2 * KV + 2 * MLP + HIDDEN
"""Of the linears of a layer."""

WEIGHTS = HIDDEN * (2 * HIDDEN + 2 * KV + 3 * MLP)


def test_the_page_has_the_table_of_today() -> None:
    lines = [line for line in read_table(PAGE, TABLE).splitlines(keepends=True) if line.startswith("|")]
    assert "".join(lines) == sizes_table(), "run scripts/run memory_sizes --docs"


def test_weights_are_their_codes_and_scales() -> None:
    outer = 2 * VOCABULARY * (HIDDEN + 2)
    assert weight_bytes("w4a16") == LAYERS * (WEIGHTS // 2 + 2 * WEIGHTS // 128) + outer
    assert weight_bytes("w8a16") == LAYERS * (WEIGHTS + 2 * OUTPUTS) + outer


def test_keys_and_values_are_bytes_with_a_scale_a_head() -> None:
    values = 32_768 * LAYERS * 2 * KV
    assert values < kv_bytes() <= values * 1.04


def test_what_has_room_has_room_and_one_more_has_none() -> None:
    for row in read_cells(PAGE, TABLE):
        linears = "all" if row["rank 16 on"].startswith("all") else row["rank 16 on"].replace(" ", "")
        size = adapter_bytes(linears, row["stored as"])  # type: ignore[arg-type]
        assert number(row["an adapter"]) == pytest.approx(size / 2**20, abs=0.06)
        for scheme in ("w4a16", "w8a16"):
            count = room_for_adapters(scheme, linears, row["stored as"])  # type: ignore[arg-type]
            (told,) = [number(cell) for heading, cell in row.items() if heading.startswith(f"beside {scheme}")]
            assert told == count
            others = weight_bytes(scheme) + kv_bytes() + 2**30
            assert others + count * size <= 24 * 2**30 < others + (count + 1) * size


def test_the_command_writes_the_table_with_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- {TABLE}: begin -->\nold\n<!-- {TABLE}: end -->\n")
    monkeypatch.setattr(memory_sizes, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["scripts/run memory_sizes", "--docs"])

    memory_sizes.main(update_docs=True)

    assert (
        read_table(page, TABLE)
        == f"{sizes_table()}\nBy `scripts/run memory_sizes --docs`. Keys and values take 2.1 GiB.\n"
    )
