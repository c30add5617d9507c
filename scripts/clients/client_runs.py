"""Runs client programs as their authors ship them, against servers that it starts."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from checkpoints.prepare_default_model import ensure_default_checkpoint
from clients.client_inputs import write_inputs
from clients.client_program import ClientProgram, Outcome, Served
from multilora_engine.tritonserver.upstream_models import UpstreamModels
from servers.openai_front import started_openai_front
from servers.started_server import started_server
from training.sample_adapters import ADAPTERS_DIRECTORY, SAMPLE_ADAPTERS

TIMEOUT_S = 300.0
"""The limit for one program."""

_PARAMETERS = {"kv_cache_memory_bytes": "512MiB", "max_num_seqs": "16", "lora_cache_host_memory_bytes": "512MiB"}

_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Run:
    """The end of a program. output: stdout and stderr, in the order they came."""

    program: ClientProgram
    status: int
    output: str

    @property
    def passed(self) -> bool:
        return self.program.passes(self.status, self.output)


def run_all(programs: Sequence[ClientProgram], clients: Path, python: Path) -> Iterator[Run]:
    """The runs of the rows that can be run, in their order for each kind of server, which is started once.

    clients: the directory that has {folder}; python: {python}; both in the rows' commands.
    """
    runnable = [row for row in programs if row.expected is not Outcome.NOT_RUN]
    by_server = sorted(runnable, key=lambda row: list(Served).index(row.served))
    with tempfile.TemporaryDirectory() as directory:
        inputs = write_inputs(Path(directory), ensure_default_checkpoint())
        folders = {"clients": str(_FOLDER), "scripts": str(_FOLDER.parent)}
        common = {**inputs, **folders, "python": str(python), "scratch": directory}
        for served, rows in groupby(by_server, lambda row: row.served):
            with _up(served) as places:
                for row in rows:
                    yield run(row, {**common, **places}, clients)


def run(program: ClientProgram, places: Mapping[str, str], clients: Path) -> Run:
    folder = clients.absolute() / program.folder
    if not folder.is_dir():
        return Run(program, -1, f"there is no {folder}")
    command = program.command({"folder": str(folder), **places})
    try:
        done = subprocess.run(
            command,
            cwd=places["scratch"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return Run(program, -1, f"{(error.output or b'').decode(errors='replace')}\nnot done after {TIMEOUT_S:g} s")
    return Run(program, done.returncode, done.stdout.decode(errors="replace"))


@contextmanager
def _up(served: Served) -> Iterator[dict[str, str]]:
    """The places of a server of this kind, while it runs."""
    model = ensure_default_checkpoint()
    models = UpstreamModels.UNARY if served is Served.UNARY else UpstreamModels.DECOUPLED
    with started_server(model, upstream_models=models, overrides=_PARAMETERS) as server:
        places = {
            "grpc": server.grpc_url,
            "http": server.http_url,
            "model": str(model),
            "adapters": str(ADAPTERS_DIRECTORY),
        }
        if served is not Served.OPENAI:
            yield places
            return
        with _openai_front(server.grpc_url) as address:
            yield {**places, "openai": address}


@contextmanager
def _openai_front(grpc: str) -> Iterator[str]:
    """OpenAI's front with the sample adapters by their names; its host:port."""
    with started_openai_front(grpc, *(f"--adapter={a.name}={a.directory}" for a in SAMPLE_ADAPTERS.values())) as front:
        yield front
