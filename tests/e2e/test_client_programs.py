"""Clients' programs as their authors ship them, in the folder that --clients names; and how their rows are judged."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.client_inputs import write_inputs
from support.client_programs import PROGRAMS, ClientProgram, Outcome, markdown

from conformance import PAGE
from marked_tables import read_table
from multilora_engine.tritonserver.upstream_models import UpstreamModels
from servers.started_server import started_server
from training.sample_adapters import ADAPTERS_DIRECTORY

TIMEOUT_S = 300.0
"""The limit for one program."""

PARAMETERS = {
    "kv_cache_memory_bytes": "512MiB",
    "max_num_seqs": "16",
    "lora_cache_host_memory_bytes": "512MiB",
    "lora_sources": json.dumps([{"source": "directory", "root": str(ADAPTERS_DIRECTORY)}]),
}
ROW = ClientProgram("ask.py", "v1", "streamed", "asker-v1", ("{python}", "{folder}/ask.py", "{http}", "a b"), "Par.s")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> dict[str, str]:
    scratch = tmp_path_factory.mktemp("scratch")
    return {**write_inputs(scratch, default_model_dir), "scratch": str(scratch)}


@pytest.fixture(scope="module", params=list(UpstreamModels)[1:], ids=str)
def served(request: pytest.FixtureRequest, default_model_dir: Path) -> Iterator[tuple[UpstreamModels, dict[str, str]]]:
    """A server with upstream's models of each kind in turn, and its places."""
    with started_server(default_model_dir, upstream_models=request.param, overrides=PARAMETERS) as server:
        urls = {"grpc": server.grpc_url, "http": server.http_url}
        yield request.param, {**urls, "model": str(default_model_dir), "adapters": str(ADAPTERS_DIRECTORY)}


@pytest.mark.client_program
@pytest.mark.parametrize(
    "row",
    [row for row in PROGRAMS if row.expected is not Outcome.NOT_RUN],
    ids=lambda row: f"{row.program} {row.version} {row.mode}",
)
def test_a_program_goes_as_expected(
    row: ClientProgram, served: tuple[UpstreamModels, dict[str, str]], inputs: dict[str, str], pytestconfig
) -> None:
    kind, places = served
    if kind is not row.served:
        pytest.skip("it is for the other server")
    folder = Path(pytestconfig.getoption("clients")).absolute() / row.folder
    assert folder.is_dir(), "the folder is not there"
    python = str(pytestconfig.getoption("clients_python"))
    command = row.command({**inputs, **places, "python": python, "folder": str(folder)})
    done = subprocess.run(
        command,
        cwd=inputs["scratch"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    assert row.passes(done.returncode, output), output


def test_a_command_has_the_places_of_a_run_and_keeps_its_arguments_whole() -> None:
    places = {"python": "/bin/py", "folder": "/c/asker v1", "http": "localhost:1", "grpc": "unused"}
    assert ROW.command(places) == ["/bin/py", "/c/asker v1/ask.py", "localhost:1", "a b"]
    with pytest.raises(KeyError, match="metrics"):
        replace(ROW, argv=("{metrics}",)).command(places)


@pytest.mark.parametrize(
    ("expected", "status", "output", "passed"),
    [
        (Outcome.WORKS, 0, "It is Paris.", True),
        (Outcome.WORKS, 1, "It is Paris.", False),
        (Outcome.WORKS, 0, "Received an error from server", False),
        (Outcome.REFUSED, 1, "It is Paris.", True),
        (Outcome.REFUSED, 0, "It is Paris.", True),
        (Outcome.REFUSED, 1, "Traceback", False),
    ],
)
def test_a_run_passes_by_what_it_shows_and_one_that_shall_work_by_its_status_too(
    expected: Outcome, status: int, output: str, passed: bool
) -> None:
    assert replace(ROW, expected=expected).passes(status, output) == passed


def test_the_table_has_a_line_for_what_ends_alike() -> None:
    whole = replace(ROW, mode="whole")
    noted = replace(ROW, mode="images", expected=Outcome.NOT_RUN, note="it needs a GPU")
    rows = [ROW, whole, replace(ROW, version="v2"), replace(whole, version="v2"), noted, replace(whole, version="v3")]
    assert markdown(rows).splitlines()[2:] == [
        "| `ask.py` | v1, v2 | streamed | works |",
        "| `ask.py` | v1, v2, v3 | whole | works |",
        "| `ask.py` | v1 | images | not run: it needs a GPU |",
    ]
    assert markdown(rows[:4]).splitlines()[2:] == ["| `ask.py` | v1, v2 | streamed; whole | works |"]


def test_the_page_has_every_program() -> None:
    assert read_table(PAGE, "client programs") == markdown(PROGRAMS)
    assert len({(row.program, row.version, row.mode) for row in PROGRAMS}) == len(PROGRAMS) > 50


def test_every_row_that_is_run_shows_something_and_every_one_that_is_not_says_why() -> None:
    for row in PROGRAMS:
        assert row.note if row.expected is Outcome.NOT_RUN else row.shows and row.argv
