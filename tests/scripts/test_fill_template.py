from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPOSITORY / "scripts" / "run.py", "fill_template", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_copy_is_filled_then_changed_in_place_by_one_of_its_files_and_the_source_stays(tmp_path: Path) -> None:
    source, copy = REPOSITORY / "model_repository", tmp_path / "copy"
    before = (source / "generation" / "config.pbtxt").read_text()
    first = run(source, "max_loras:4,engine_dir:/e", "--output", copy)
    assert first.returncode == 0, first.stderr
    assert first.stderr.splitlines() == [
        "set max_loras: max_loras of generation",
        "ignored engine_dir: there are no engine files; give model_path, the directory of a Hugging Face checkpoint",
    ]
    assert run("-i", copy / "preprocessing" / "config.pbtxt", "max_loras:5").returncode == 0
    assert '"max_loras"  value { string_value: "5" }' in (copy / "generation" / "config.pbtxt").read_text()
    assert (source / "generation" / "config.pbtxt").read_text() == before


def test_an_unknown_key_leaves_no_copy_behind(tmp_path: Path) -> None:
    refused = run(REPOSITORY / "model_repository", "max_lora:4", "--output", tmp_path / "copy")
    assert (refused.returncode, (tmp_path / "copy").exists()) == (1, False)
    assert refused.stderr.startswith("error: unknown parameter max_lora, did you mean max_loras")


def test_without_a_place_nothing_is_written() -> None:
    assert "say where to" in run(REPOSITORY / "model_repository", "max_loras:4").stderr
