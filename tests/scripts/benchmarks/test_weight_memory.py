"""Loading a model takes the memory of its weights, by a process that measures itself, and little more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import weight_memory
from benchmarks.weight_memory import TABLE, Loaded, load_in_a_fresh_process
from checkpoints.tiny_llama import save_tiny_llama
from marked_tables import read_table


def test_a_process_grows_by_the_weights_that_it_loads(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, hidden_size=512, intermediate_size=4096, num_hidden_layers=4)
    loaded = load_in_a_fresh_process(tmp_path, torch.float32)
    mlps = 4 * 4 * 3 * 512 * 4096
    assert mlps < loaded.weights < 1.5 * mlps
    assert loaded.weights <= loaded.growth < 1.5 * loaded.weights


def test_the_command_writes_a_table_and_fails_where_the_process_grew_by_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- {TABLE}: begin -->\nold\n<!-- {TABLE}: end -->\n")
    models = {"w8a16": Loaded(100 << 20, 104 << 20)}
    monkeypatch.setattr(weight_memory, "PAGE", page)
    monkeypatch.setattr(weight_memory, "measured_source", lambda: "By hand.")
    monkeypatch.setattr(weight_memory, "checkpoints", lambda: dict.fromkeys(models, ("w8a16",)))
    monkeypatch.setattr(weight_memory, "load_in_a_fresh_process", models.__getitem__)

    weight_memory.main(update_docs=True)

    assert "| w8a16 | 100.0 MiB | 104.0 MiB | 1.040 x |\n\nBy hand.\n" in read_table(page, TABLE)
    models["w8a16"] = Loaded(100 << 20, 106 << 20)
    with pytest.raises(weight_memory.typer.Exit):
        weight_memory.main()
    assert "| w8a16 | 100.0 MiB | 106.0 MiB | 1.060 x |" in capsys.readouterr().out
