"""`multilora quantize` as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from checkpoints.tiny_llama import save_tiny_llama
from multilora_client import quantize_command
from multilora_client.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "float", hidden_size=64, intermediate_size=96)


def test_it_writes_a_checkpoint_and_says_in_a_line_what_it_is(checkpoint: Path, tmp_path: Path) -> None:
    result = run(
        checkpoint,
        "--scheme",
        "w4a16",
        "--asymmetric",
        "--output",
        tmp_path / "out",
        "--no-perplexity",
        "--device",
        "cpu",
    )

    assert (result.exit_code, result.stderr) == (0, "")
    line = r"15 modules as w4a16, asymmetric, groups of 32; 0\.4 -> 0\.1 MB; rounded in \d+\.\d s\n"
    assert re.fullmatch(re.escape(f"{tmp_path / 'out'}: ") + line, result.stdout)
    assert (tmp_path / "out/config.json").is_file()


def test_a_refusal_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    result = run(checkpoint, "--scheme", "w4a16", "--group-size", 128, "--output", tmp_path / "out", "--no-perplexity")

    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"error: \[INVALID_ARG\] .*groups of 128 do not divide; .*\n", result.stderr)
    assert not (tmp_path / "out").exists()


def test_an_absent_checkpoint_is_one_line(tmp_path: Path) -> None:
    result = run(tmp_path / "nothing", "--scheme", "fp8", "--output", tmp_path / "out")

    assert result.exit_code == 1
    assert re.fullmatch(r"error: .*nothing.*\n", result.stderr)


def test_without_the_extra_it_says_what_to_install(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = quantize_command.find_spec
    monkeypatch.setattr(
        quantize_command, "find_spec", lambda name: None if name == "compressed_tensors" else present(name)
    )

    result = run(checkpoint, "--scheme", "fp8", "--output", tmp_path / "out")

    assert result.exit_code == 1
    assert result.stderr == (
        "error: [UNSUPPORTED] compressed_tensors missing; install the extra: pip install 'multilora-engine[quantize]'\n"
    )


def test_help_names_the_schemes() -> None:
    result = run("--help")

    assert result.exit_code == 0
    assert all(
        scheme in result.stdout for scheme in ("w4a16", "w8a16", "fp8", "--calibration", "--head", "--embeddings")
    )
