"""Measures the memory of each process of a server of the default model, in float32 and quantised, after requests.

own       memory in no file: of the engine its weights and its KV cache, so small here that it is taken whole
resident  with the part of files in memory, such as PyTorch's libraries, that falls to the process: what several
          processes share is divided among them
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from benchmarks.bench_serving import FreshPrompts, run_wave
from benchmarks.cpu_times import process_name
from benchmarks.light_client import light_asks
from checkpoints.prepare_default_model import ensure_default_checkpoint
from checkpoints.quantized_default_model import ensure_quantized_checkpoint
from marked_tables import figure, write_table
from multilora_client import ENSEMBLE
from multilora_client.bench.workload import Target
from multilora_engine.serving import metrics
from multilora_engine.tritonserver import ServerProcess
from plots import DOCS
from process_memory import anonymous_bytes, proportional_bytes
from servers.started_server import started_server
from sources import measured_source

PAGE = DOCS / "operating.md"
TABLE = "server memory"
ENGINE = "engine"
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 128, 64
KV_CACHE_BYTES = 192 << 20
"""For a bit more tokens than the requests have: all of it is in use, or taken ahead."""

MAX_OTHER_BYTES = 300_000_000
"""The goal: the most own memory of a process beside weights and KV cache."""


@dataclass(frozen=True)
class ServerMemory:
    """Bytes of the engine's weights and of its KV cache, and by process its own and its resident."""

    weights: int
    kv_cache: int
    own: Mapping[str, int]
    resident: Mapping[str, int]

    def beside(self, process: str) -> int:
        """The process' own bytes beside weights and KV cache."""
        return self.own[process] - (self.weights + self.kv_cache if process == ENGINE else 0)


def checkpoints() -> dict[str, Path]:
    """By kind of weights."""
    return {"float32": ensure_default_checkpoint(), "w4a16": ensure_quantized_checkpoint("w4a16")}


def measure_server(checkpoint: Path, console: Console) -> ServerMemory:
    """Start a server, ask it NUM_REQUESTS at once, and measure its processes."""
    overrides = {"kv_cache_memory_bytes": str(KV_CACHE_BYTES)}
    with started_server(checkpoint, console, overrides=overrides) as server:
        asyncio.run(_ask(server))
        root = psutil.Process(server.pid)
        own, resident = Counter[str](), Counter[str]()
        for process in (root, *root.children(recursive=True)):
            own[process_name(process)] += anonymous_bytes(process)
            resident[process_name(process)] += proportional_bytes(process)
        with urllib.request.urlopen(server.metrics_url, timeout=30) as response:
            text = response.read().decode()
    return ServerMemory(_value(text, metrics.WEIGHT_BYTES), _value(text, metrics.KV_CACHE_BYTES), own, resident)


async def _ask(server: ServerProcess) -> None:
    prompts = FreshPrompts(PROMPT_TOKENS)
    async with light_asks(server.grpc_url, (ENSEMBLE,), OUTPUT_TOKENS) as (ask,):
        samples = await run_wave(ask, [Target()] * NUM_REQUESTS, prompts.take(NUM_REQUESTS))
    assert all(sample.is_answered for sample in samples), [sample.error for sample in samples]


def _value(text: str, metric: metrics.MetricName) -> int:
    """The only value of a metric in the text that Prometheus reads."""
    (value,) = re.findall(rf"^{metric.name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return int(float(value))


def memory_table(servers: Mapping[str, ServerMemory]) -> str:
    """A row for each process, the largest first; for each kind of weights what it has, and what it has besides."""
    measures = ("own", "beside weights and KV cache", "resident")
    headings = [f"{name}, {measure}" for name in servers for measure in measures]
    lines = [f"| process | {' | '.join(headings)} |", f"| --- |{' ---: |' * len(headings)}"]
    first = next(iter(servers.values()))
    for process in sorted(first.own, key=lambda name: -first.own[name]):
        cells = [
            _megabytes(num_bytes)
            for server in servers.values()
            for num_bytes in (server.own[process], server.beside(process), server.resident[process])
        ]
        lines.append(f"| {process} | {' | '.join(cells)} |")
    sums = [
        _megabytes(num_bytes)
        for server in servers.values()
        for num_bytes in (sum(server.own.values()), sum(map(server.beside, server.own)), sum(server.resident.values()))
    ]
    return "\n".join([*lines, f"| all | {' | '.join(sums)} |"]) + "\n"


def _megabytes(num_bytes: int) -> str:
    return f"{figure(num_bytes / 1e6)} MB"


def main(
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/operating.md.")] = False,
) -> None:
    """Measure a server's processes, print a table, and fail where one has more than the goal beside its weights."""
    source, console = measured_source() if update_docs else "", Console()
    servers = {name: measure_server(checkpoint, console) for name, checkpoint in checkpoints().items()}
    table = memory_table(servers)
    print(table, end="")
    if update_docs:
        write_table(PAGE, TABLE, table, source)
    if any(server.beside(process) > MAX_OTHER_BYTES for server in servers.values() for process in server.own):
        raise typer.Exit(1)
