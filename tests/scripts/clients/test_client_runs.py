from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import typer

import conformance
from clients import client_runs
from clients.client_program import ClientProgram, Outcome, Served
from clients.client_runs import Run, run, run_all
from training.sample_adapters import SAMPLE_ADAPTERS

PROGRAM = """
import os, sys
print("asked", *sys.argv[1:], "in", os.getcwd())
print("bad luck", file=sys.stderr)
sys.exit(len(sys.argv) - 2)
"""


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    """A user's folder with a program that prints its arguments and ends with the number of those after the first."""
    folder = tmp_path / "clients" / "asker-v1"
    folder.mkdir(parents=True)
    (folder / "ask.py").write_text(PROGRAM)
    return folder.parent


def asker(
    *arguments: str, shows: str = "asked", served: Served = Served.DECOUPLED, folder: str = "asker-v1"
) -> ClientProgram:
    return ClientProgram(
        "ask.py", "v1", f"{arguments}", folder, ("{python}", "{folder}/ask.py", *arguments), shows, served
    )


def places(tmp_path: Path) -> dict[str, str]:
    return {"python": sys.executable, "scratch": str(tmp_path), "grpc": "host:1"}


def test_a_program_runs_in_the_scratch_directory_and_its_output_is_kept(clients: Path, tmp_path: Path) -> None:
    done = run(asker("{grpc}"), places(tmp_path), clients)
    assert (done.status, done.passed) == (0, True)
    assert f"asked host:1 in {tmp_path}" in done.output
    assert "bad luck" in done.output


def test_a_program_that_fails_or_shows_something_else_has_not_passed(clients: Path, tmp_path: Path) -> None:
    assert run(asker("a", "b"), places(tmp_path), clients).status == 1
    assert not run(asker("a", "b"), places(tmp_path), clients).passed
    assert not run(asker("a", shows="answered"), places(tmp_path), clients).passed


def test_a_folder_that_the_user_has_not_is_named(clients: Path, tmp_path: Path) -> None:
    done = run(asker("a", folder="asker-v2"), places(tmp_path), clients)
    assert (done.passed, done.output) == (False, f"there is no {clients / 'asker-v2'}")


def test_a_program_that_does_not_end_is_ended(clients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_runs, "TIMEOUT_S", 1.0)
    endless = replace(asker(), argv=("sleep", "infinity"))
    done = run(endless, places(tmp_path), clients)
    assert (done.passed, done.output) == (False, "\nnot done after 1 s")


def test_each_kind_of_server_is_started_once_and_rows_keep_their_order_before_it(
    clients: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    @contextmanager
    def up(served: Served) -> Iterator[dict[str, str]]:
        started.append(served)
        yield {"grpc": f"{served}:1"}

    monkeypatch.setattr(client_runs, "_up", up)
    monkeypatch.setattr(client_runs, "ensure_default_checkpoint", Path)
    monkeypatch.setattr(client_runs, "write_inputs", lambda directory, model: {"prompt": str(directory)})
    rows = [
        asker("{grpc}1"),
        asker("{grpc}2", served=Served.UNARY),
        replace(asker("{nothing}"), expected=Outcome.NOT_RUN, note="why"),
        asker("{grpc}3"),
        asker("{prompt}"),
    ]
    runs = list(run_all(rows, clients, Path(sys.executable)))
    assert started == [Served.DECOUPLED, Served.UNARY]
    assert [done.program for done in runs] == [rows[0], rows[3], rows[4], rows[1]]
    assert all(done.passed for done in runs)
    said = [done.output.splitlines()[0].split()[1] for done in runs]
    assert said[:2] + said[3:] == ["decoupled:11", "decoupled:13", "unary:12"]
    assert runs[2].output.splitlines()[0] == f"asked {said[2]} in {said[2]}"


def test_the_command_prints_what_a_program_that_failed_said_and_ends_with_1(
    clients: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = asker("a"), asker("a", "b")
    monkeypatch.setattr(conformance, "PROGRAMS", (good, bad))
    monkeypatch.setattr(conformance, "run_all", lambda rows, *_: (Run(row, len(row.argv) - 3, "asked") for row in rows))
    with pytest.raises(typer.Exit):
        conformance.run_programs(clients, Path(sys.executable), only=[""], update_docs=True)
    assert "1 of 2 runs went as expected" in capsys.readouterr().out
    conformance.run_programs(clients, Path(sys.executable), only=["none", "('a',)"], update_docs=False)
    assert "1 of 1 runs went as expected" in capsys.readouterr().out


def test_the_front_of_a_run_serves_the_base_model_and_the_sample_adapters() -> None:
    """The server behind it does not matter."""
    with client_runs._openai_front("127.0.0.1:1") as address:
        names = {model["id"] for model in httpx2.get(f"http://{address}/v1/models").json()["data"]}
    assert names == {"base", *SAMPLE_ADAPTERS}
