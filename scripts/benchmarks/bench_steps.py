"""How fast whole steps of a model are, beside the limits of memory and arithmetic: no scheduler, sampling or server.

The model has the shape of Llama-3.1-8B and random weights, so nothing is downloaded. Decode steps have 1, 32 and 128
sequences, each with the same context, and no adapters, one, or as many distinct ones as sequences; on a GPU they are
replayed as CUDA graphs, as the engine does. Prefill is one prompt of 2048 tokens.

limit   the larger of: bytes that must move over measured bandwidth, flops over measured peak of a matrix product. Bytes
        are weights, keys and values, and the step's adapters, each once; flops are those of the base model's linears.

The steps and the limits of one batch size run in turn, round after round, and medians are reported. Takes a few minutes
on a GPU with 48 GB; on a CPU it wants a smaller model (--tiny). Nothing of it has been measured on a GPU yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.bench_rows import Row, render, threads_title, write_results
from benchmarks.machine_limits import Clock, EagerClock, Yardsticks, measure
from benchmarks.model_steps import EIGHT_BILLION, TINY, Sizes, Storage, Workbench

GOAL_OF_LIMIT = 0.8
"""The goal for a decode step of one sequence without adapters: the share of its limit."""

GOAL_OF_BASE = 0.85
"""The goal: the share of the base model's speed, with as many distinct adapters as the largest batch has sequences."""


def bench_decode(bench: Workbench, batch: int, clock: Clock, rounds: int) -> list[Row]:
    """Measure a batch size with every number of adapters."""
    counts = bench.sizes.adapters(batch)
    yardsticks = Yardsticks(clock.device, bench.model.dtype)
    steps = {f"{n}": bench.decode(batch, n) for n in counts}
    seconds = measure(steps | yardsticks.steps, clock, rounds)
    limits = yardsticks.limits(seconds)
    rows = []
    for n in counts:
        num_bytes, num_flops = bench.decode_work(batch, n)
        of_limit = limits.seconds(num_bytes, num_flops) / seconds[f"{n}"]
        of_base = seconds["0"] / seconds[f"{n}"]
        name = f"decode {batch} sequences, {n} adapters"
        rows += [
            Row(name, 1e3 * seconds[f"{n}"], "ms"),
            Row(name, batch / seconds[f"{n}"], "tokens/s"),
            _share(name, of_limit, "% of limit", GOAL_OF_LIMIT if (batch, n) == (1, 0) else None),
            _share(name, of_base, "% of base", GOAL_OF_BASE if n == max(bench.sizes.batches) else None),
        ]
    return rows


def bench_prefill(bench: Workbench, clock: Clock, rounds: int) -> list[Row]:
    """Measure one prompt."""
    yardsticks = Yardsticks(clock.device, bench.model.dtype)
    seconds = measure({"prefill": bench.prefill()} | yardsticks.steps, EagerClock(clock.device), rounds)
    num_tokens = bench.sizes.prompt
    flops = 2.0 * bench.num_layer_weights * num_tokens
    name = f"prefill {num_tokens} tokens"
    return [
        Row(name, num_tokens / seconds["prefill"], "tokens/s"),
        _share(name, flops / yardsticks.limits(seconds).peak / seconds["prefill"], "% of peak", None),
    ]


def _share(what: str, share: float, unit: str, goal: float | None) -> Row:
    if goal is None:
        return Row(what, 100 * share, unit)
    return Row(what, 100 * share, unit, f">= {goal:.0%}", share >= goal)


def bench_all(bench: Workbench, rounds: int, console: Console) -> list[Row]:
    """Measure all batch sizes, then the prompt."""
    clock, rows = Clock(bench.device.type), []
    with Progress(console=console) as progress:
        for batch in progress.track(bench.sizes.batches, description="decode"):
            rows += bench_decode(bench, batch, clock, rounds)
    return rows + bench_prefill(bench, clock, rounds)


def main(
    output: Annotated[Path, typer.Option(help="Folder for steps.csv and steps.png.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(help="Times each step runs.")] = 21,
    context: Annotated[int, typer.Option(help="Tokens that each decoding sequence attends to.")] = 512,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 2048,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of thousands of weights, to try the script.")] = False,
) -> None:
    """Measure whole steps of a model with random weights."""
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    title = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {threads_title()}"
    bench = Workbench(
        TINY if tiny else EIGHT_BILLION, Sizes((1, 32, 128), context, prompt), Storage(dtype, dtype), device
    )
    rows = bench_all(bench, rounds, console)
    console.print(render(rows, title))
    write_results(rows, output, "steps")
    console.print(f"Wrote {output}/steps.csv and {output}/steps.png")
