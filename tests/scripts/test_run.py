from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from run import SCRIPTS, describe, find_commands, list_commands

COMMANDS = find_commands()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPTS / "run.py", *arguments], capture_output=True, text=True, timeout=120)


def test_every_module_with_a_main_is_a_command_and_no_other() -> None:
    assert {"bench_peers", "bench_engine", "inject_faults", "train_sample_adapters", "try_images"} <= set(COMMANDS)
    assert {"run", "served_environment", "results", "soak_memory"}.isdisjoint(COMMANDS)


def test_no_two_commands_share_a_name() -> None:
    files = [file for folder in ("*.py", "*/*.py") for file in SCRIPTS.glob(folder)]
    assert len({file.stem for file in files if file.stem != "__init__"}) == sum(f.stem != "__init__" for f in files)


def test_the_list_has_a_row_for_each_command() -> None:
    console = Console(record=True, width=300)
    list_commands(COMMANDS, console)
    rows = console.export_text().splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(COMMANDS)
    assert all(describe(file) in row for file, row in zip(COMMANDS.values(), rows, strict=True))


@pytest.mark.parametrize("file", COMMANDS.values(), ids=COMMANDS)
def test_typer_can_read_the_options_of_every_command(file: Path) -> None:
    module = importlib.import_module(".".join(file.relative_to(SCRIPTS).with_suffix("").parts))
    app = typer.Typer()
    app.command()(module.main)
    typer.main.get_command(app)


def test_an_unknown_command_is_named_and_fails() -> None:
    refused = run("bench_nothing")
    assert refused.returncode == 1
    assert "there is no command 'bench_nothing'" in refused.stderr
    assert "bench_engine" in refused.stdout


def test_arguments_and_options_go_to_the_command() -> None:
    done = run("fill_template", "--help")
    assert done.returncode == 0
    assert "--in_place" in done.stdout
    assert "Usage: run fill_template" in done.stdout


def test_a_module_without_a_docstring_has_no_description(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("def main() -> None: ...\n")
    with pytest.raises(ValueError, match=r"silent\.py does not say"):
        describe(tmp_path / "silent.py")
