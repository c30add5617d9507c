"""`multilora quantize` as a user runs it."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.tiny_tokenizer import save_tiny_tokenizer
from tokenizers import Tokenizer, pre_tokenizers
from typer.testing import CliRunner, Result

from checkpoints.tiny_llama import VOCAB_SIZE, save_tiny_llama
from multilora_client import quantize_command
from multilora_client.cli import app
from multilora_engine.quantize import Report


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
    line = r"15 modules as w4a16, asymmetric, groups of 32; 0\.4 -> 0\.1 MB; rounded in \d+\.\d s\n.*vLLM.*\n"
    assert re.fullmatch(re.escape(f"{tmp_path / 'out'}: ") + line, result.stdout)
    assert (tmp_path / "out/config.json").is_file()


def test_a_refusal_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    result = run(checkpoint, "--scheme", "w4a16", "--group-size", 128, "--output", tmp_path / "out", "--no-perplexity")

    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"error: \[INVALID_ARG\] .*groups of 128 do not divide; .*\n", result.stderr)
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_is_not_there_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run(checkpoint, "--scheme", "w4a16", "--output", tmp_path / "out", "--device", "cuda")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--device cuda: torch finds no GPU; leave the option out, or write cpu" in result.stderr


@pytest.mark.parametrize(
    ("factor", "number"),
    [(1.0, r"\d+\.\d{3}"), (10.0, r"\d\.\d+e\+\d+"), (1e6, "inf")],
    ids=["usual", "large", "infinite"],
)
def test_perplexity_is_a_short_number_and_that_of_fp8_says_what_it_is_of(
    tmp_path: Path, factor: float, number: str
) -> None:
    checkpoint = save_tiny_llama(tmp_path / "in", hidden_size=64, intermediate_size=96, tie_word_embeddings=False)
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * factor}, checkpoint / "model.safetensors")
    words = Tokenizer.from_file(str(save_tiny_tokenizer(checkpoint) / "tokenizer.json"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(checkpoint / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * i % VOCAB_SIZE}" for i in range(100)))

    result = run(checkpoint, "--scheme", "fp8", "--output", tmp_path / "out", "--text", tmp_path / "text.txt")

    first, second = result.stdout.splitlines()
    assert re.search(f"; perplexity {number} -> {number} over 100 tokens; ", first)
    assert "of rounded weights with float activations" in second


def test_a_full_disk_is_one_line_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with files_of_at_most(30_000):
        result = run(checkpoint, "--scheme", "w4a16", "--output", tmp_path / "out", "--no-perplexity")

    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"error: cannot write .*model\.safetensors: .*\n", result.stderr)
    assert not list(tmp_path.iterdir())


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The system refuses to write more, as it does on a full disk."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


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
        "error: [UNSUPPORTED] compressed_tensors missing; install the extra: "
        "pip install './backend_src[quantize]' in a clone\n"
    )


def test_help_names_the_readers_of_zero_points() -> None:
    assert "transformers 5 does not load it" in " ".join(run("--help").stdout.split())


def test_help_names_the_schemes() -> None:
    result = run("--help")

    assert result.exit_code == 0
    assert all(
        scheme in result.stdout for scheme in ("w4a16", "w8a16", "fp8", "--calibration", "--head", "--embeddings")
    )


@pytest.mark.parametrize(
    ("before", "after", "is_worse"),
    [
        (10.0, 10.9, False),
        (10.0, 11.2, True),
        (10.0, float("inf"), True),
        (10.0, float("nan"), True),
        (None, None, False),
    ],
)
def test_a_perplexity_that_is_much_worse_is_told_with_what_helps(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: float, after: float, is_worse: bool
) -> None:
    def report(*_: object, **__: object) -> Report:
        return Report("w4a16", 1, 10, 5, before, after, 7, 0, 0.0, 0.0)

    monkeypatch.setattr("multilora_engine.quantize.quantize_checkpoint", report)
    result = run(checkpoint, "--scheme", "w4a16", "--output", tmp_path / "out")
    assert result.exit_code == 0
    assert ("more than a tenth worse: try --calibration" in result.stderr) is is_worse
