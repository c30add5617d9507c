"""Tokens per second through the real server: how many requests at once, and what their adapters cost.

Every cell is one wave of requests that start together: 128 prompt tokens, 64 answer tokens each, on the direct model
`generation`, streaming. The cells of a round run one after another and the rounds repeat, so that what else the machine
does hits all of them; medians are reported.
"""

from __future__ import annotations

import csv
import os
import platform
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from prepare_default_model import ensure_default_checkpoint
from rich.console import Console
from rich.progress import track
from rich.table import Table

from multilora_client import Adapter, AdapterTensors, Client
from multilora_engine.lora.format import adapter_layout, lora_modules
from multilora_engine.models.model_config import read_model_config
from multilora_engine.tritonserver import ServerOptions, ServerProcess

REPOSITORY = Path(__file__).resolve().parents[1]
MODULES = (1, 2, 3, 4, 5, 6, 7)
ADAPTER_MIXES = ("none", "one", "all different")


@dataclass(frozen=True)
class Cell:
    """One measured setting."""

    concurrency: int
    adapters: str


@dataclass(frozen=True)
class Wave:
    """One run of a cell: seconds from the common start to the last token, and to each request's first."""

    seconds: float
    first_token_seconds: list[float]


def random_adapter(model: Path, lora_task_id: int, rank: int) -> Adapter:
    """Small random numbers on every linear layer, float16: what they answer does not matter here."""
    layout = adapter_layout(read_model_config(model), rank, "float16")
    modules = lora_modules(layout)
    config = np.array([[m, layer, rank, 0] for layer in range(layout.num_layers) for m in MODULES], np.int32)
    width = max(modules[m].num_values(rank, False) for m in MODULES)
    weights = np.zeros((len(config), width), np.float16)
    rng = np.random.default_rng(lora_task_id)
    for row, (module_id, *_) in zip(weights, config.tolist(), strict=True):
        size = modules[module_id].num_values(rank, False)
        row[:size] = rng.standard_normal(size, np.float32) * 0.01
    return Adapter(lora_task_id, AdapterTensors(weights, config, "FP16"))


def task_ids(cell: Cell) -> list[int | None]:
    """The adapter of each request of a wave; task ids start at 1."""
    if cell.adapters == "none":
        return [None] * cell.concurrency
    return [1] * cell.concurrency if cell.adapters == "one" else list(range(1, cell.concurrency + 1))


def run_wave(client: Client, tasks: Sequence[int | None], prompt: list[int], max_tokens: int) -> Wave:
    """Ask once for each task id, all at the same time."""
    start = time.perf_counter()

    def ask(task: int | None) -> float:
        chunks = client.stream(input_ids=prompt, adapter=task, max_tokens=max_tokens, end_id=-1)
        next(chunks)
        first = time.perf_counter() - start
        *_, last = chunks
        assert last.num_output_tokens == max_tokens
        return first

    with ThreadPoolExecutor(len(tasks)) as pool:
        first_token_seconds = list(pool.map(ask, tasks))
    return Wave(time.perf_counter() - start, first_token_seconds)


def main(
    concurrency: Annotated[list[int], typer.Option(help="Requests at once; repeat for several.")] = [1, 8, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Repetitions of every cell, interleaved; medians are reported.")] = 3,
    rank: Annotated[int, typer.Option(help="Rank of the adapters, which are on all linear layers.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    model: Annotated[Path | None, typer.Option(help="Checkpoint to serve; default: the embedded model.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the table as CSV to this file.")] = None,
) -> None:
    """Measure tokens/s and time to first token through a server that this command starts and stops."""
    console = Console()
    model = model or ensure_default_checkpoint()
    cells = [Cell(n, adapters) for n in concurrency for adapters in ADAPTER_MIXES]
    options = ServerOptions(
        model=model, model_repository=REPOSITORY / "model_repository", http_port=0, grpc_port=0, metrics_port=0
    )
    with console.status("starting the server"), ServerProcess(options) as server:
        server.wait_ready()
        waves = measure(server, model, cells, rounds, rank, prompt_tokens, output_tokens)
    rows = [summarise(cell, waves[cell], output_tokens) for cell in cells]
    console.print(render(rows))
    console.print(f"{cpu_name()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    if output:
        with output.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(rows)


def cpu_name() -> str:
    """As Linux calls it, such as `AMD EPYC`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


def measure(
    server: ServerProcess,
    model: Path,
    cells: Sequence[Cell],
    rounds: int,
    rank: int,
    prompt_tokens: int,
    output_tokens: int,
) -> dict[Cell, list[Wave]]:
    rng = np.random.default_rng(0)
    waves: dict[Cell, list[Wave]] = {cell: [] for cell in cells}
    with Client(f"grpc://{server.grpc_url}") as client:
        for task in range(1, max(cell.concurrency for cell in cells) + 1):
            client.upload(random_adapter(model, task, rank))
        run_wave(client, [None, 1], [1] * prompt_tokens, 4)
        for cell in track([cell for _ in range(rounds) for cell in cells], "measuring"):
            prompt = rng.integers(100, 10_000, prompt_tokens).tolist()
            waves[cell].append(run_wave(client, task_ids(cell), prompt, output_tokens))
    return waves


COLUMNS = ("concurrency", "adapters", "tokens/s", "tokens/s, lowest", "tokens/s, highest", "first token, ms")


def summarise(cell: Cell, waves: Sequence[Wave], output_tokens: int) -> tuple[int, str, float, float, float, float]:
    rates = [cell.concurrency * output_tokens / wave.seconds for wave in waves]
    first = statistics.median(seconds for wave in waves for seconds in wave.first_token_seconds)
    return cell.concurrency, cell.adapters, statistics.median(rates), min(rates), max(rates), first * 1e3


def render(rows: Sequence[tuple[int, str, float, float, float, float]]) -> Table:
    table = Table(title="through the server, medians")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "adapters" else "right")
    for concurrency, adapters, *numbers in rows:
        table.add_row(str(concurrency), adapters, *(f"{number:.1f}" for number in numbers))
    return table


if __name__ == "__main__":
    typer.run(main)
