"""The comparison with other engines asks each the same, and its figures can be recomputed."""

from __future__ import annotations

import csv
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.bench_engine import save_tiny_model
from benchmarks.bench_peers import compare, expected_tokens, make_cases, running
from benchmarks.peers.contestants import CONTESTANTS, Contestant, RunningPeer, environment
from benchmarks.peers.exchange import Answer, Case, Job
from benchmarks.peers.figures import Figures, with_earlier, write_figures
from benchmarks.peft_baseline import PeftBaseline


def test_figures_are_those_of_the_answers(tmp_path: Path) -> None:
    answers = [
        Answer(tokens=[[1, 2, 3], [4, 5, 6]], times=[[1.0, 1.5, 2.0], [1.2, 1.5, 4.0]]),
        Answer(tokens=[[1, 2, 3], [4, 5, 7]], times=[[1.0, 1.5, 2.0], [1.2, 1.5, 2.0]]),
        Answer(tokens=[[1, 2, 3], [4, 5, 7]], times=[[1.0, 1.5, 3.0], [1.2, 1.5, 2.0]]),
    ]
    figures = Figures.of("ours", "base", answers, [[1, 2, 3], [4, 5, 6]])
    assert figures.tokens_per_s == 6 / 3
    assert figures.first_token_ms == pytest.approx(1100)
    assert figures.gap_p99_ms == 1500
    assert (figures.num_equal, figures.num_answers) == (1, 2)
    write_figures([figures], "title", tmp_path)
    with (tmp_path / "peers.csv").open() as file:
        assert [(row["peer"], row["tokens_per_s"]) for row in csv.DictReader(file)] == [("ours", "2.0")]
    assert (tmp_path / "peers.svg").stat().st_size > 1000
    again, other = replace(figures, tokens_per_s=4.0), replace(figures, peer="theirs")
    assert with_earlier([again, other], tmp_path) == [again, other]
    assert with_earlier([other], tmp_path) == [figures, other]


def test_cases_have_one_length_each_and_every_adapter() -> None:
    cases = make_cases(vocab_size=50, num_adapters=16)
    assert all(len({len(prompt) for prompt in case.prompts}) == 1 for case in cases)
    assert {number for case in cases for number in case.adapters} == {None, *range(16)}
    assert all(token < 50 for case in cases for prompt in case.prompts for token in prompt)


def test_an_environment_gets_its_packages_once_without_what_they_bring_along_in_vain(tmp_path, monkeypatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str | Path], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append([str(word) for word in command])
        if "venv" in commands[-1]:
            Path(command[-1]).mkdir()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    contestant = Contestant("other", "no_module", "float32", ("engine==1", "tool"), ("pictures",))
    python = environment(contestant, tmp_path)
    assert environment(contestant, tmp_path) == python
    assert [words[3] for words in commands] == [commands[0][3], "install", "uninstall"]
    assert {words[0] for words in commands[1:]} == {str(python)}
    assert [words[-1] for words in commands[1:]] == ["tool", "pictures"]


@pytest.mark.long(reason="two processes load an engine each")
def test_engines_in_processes_of_their_own_give_the_same_tokens(tmp_path: Path, monkeypatch) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    adapters = PeftBaseline(model, num_adapters=2, rank=4).save(tmp_path / "adapters")
    job = Job(str(model), [str(adapter) for adapter in adapters], 4, "float32", 1, 3, 64, str(tmp_path))
    broken = Contestant("broken", "no_such_module", "float32")
    ours = next(c for c in CONTESTANTS if c.module == "ours")
    cases = [
        Case("base", [[1, 2, 3], [4, 5, 6]], [None, None], 5),
        Case("mixed", [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [None, 0, 1], 5),
    ]
    console = Console(quiet=True)
    expected = expected_tokens(job, cases, tmp_path)
    with running([broken, ours], job, tmp_path, console) as peers:
        assert [peer.name for peer in peers] == [ours.name]
        figures = compare(peers, cases, expected, 1, console)
    assert [(f.num_equal, f.num_answers) for f in figures] == [(2, 2), (3, 3)]
    monkeypatch.setattr(RunningPeer, "start", None)
    assert expected_tokens(job, cases, tmp_path) == expected
