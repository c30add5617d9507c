"""Measures the cost of the way through a fleet: tokens/s of requests that start together, at one server, and at one
worker behind a Triton front and behind Dynamo's own, all on this machine.

Each has an engine of its own; those that are not asked do nothing meanwhile. Rounds run in turn; medians are reported,
and of the shares the medians of the rounds.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.bench_rows import Row, render, threads_title, write_results
from benchmarks.bench_serving import FreshPrompts, run_wave
from benchmarks.light_client import light_asks
from checkpoints.prepare_default_model import ensure_default_checkpoint
from multilora_client import DIRECT
from multilora_client.bench.load import Ask
from multilora_client.bench.report import summarise
from multilora_client.bench.workload import Target
from servers.dynamo_fleet import DynamoFleet
from servers.started_server import started_server

MODEL = "bench"
MIN_SHARE = 90.0
"""The goal: percent of one server's tokens/s that are left behind router and front."""

ONE_SERVER, TRITON_FRONT, DYNAMO_FRONT = "one server", "worker behind a Triton front", "worker behind Dynamo's front"

Rate = Callable[[Sequence[str]], Awaitable[float]]
"""The tokens/s of prompts that are sent at the same time."""


def triton_rate(ask: Ask) -> Rate:
    """Streams of gRPC."""

    async def rate(prompts: Sequence[str]) -> float:
        samples = await run_wave(ask, [Target()] * len(prompts), prompts)
        if errors := {sample.error for sample in samples if not sample.is_answered}:
            raise RuntimeError(f"requests failed with {', '.join(sorted(errors))}")
        return summarise(samples).tokens_per_s

    return rate


def openai_rate(session: aiohttp.ClientSession, url: str, output_tokens: int) -> Rate:
    """Streams of OpenAI's API, read when they have ended, as those of gRPC are."""

    async def ask(prompt: str) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0}
        async with session.post(f"{url}/v1/completions", json={**body, "ignore_eos": True, "stream": True}) as response:
            text = await response.text()
        if response.status != 200 or '"finish_reason":"length"' not in text:
            raise RuntimeError(f"a request failed with {response.status}: {text[-200:]}")

    async def rate(prompts: Sequence[str]) -> float:
        started = time.perf_counter()
        await asyncio.gather(*map(ask, prompts))
        return len(prompts) * output_tokens / (time.perf_counter() - started)

    return rate


async def measure(
    addresses: Mapping[str, str], count: int, prompt_tokens: int, output_tokens: int, rounds: int, progress: Progress
) -> dict[str, list[float]]:
    """The tokens/s of each round. addresses: of each way to an engine."""
    async with AsyncExitStack() as resources:
        ways: dict[str, Rate] = {}
        for name in (ONE_SERVER, TRITON_FRONT):
            (ask,) = await resources.enter_async_context(light_asks(addresses[name], (DIRECT,), output_tokens))
            ways[name] = triton_rate(ask)
        timeout = aiohttp.ClientTimeout(total=600)
        connector = aiohttp.TCPConnector(limit=0)
        session = await resources.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        ways[DYNAMO_FRONT] = openai_rate(session, addresses[DYNAMO_FRONT], output_tokens)
        prompts = FreshPrompts(prompt_tokens)
        for rate in ways.values():
            await rate(prompts.take(2))
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in progress.track(range(rounds), description="rounds"):
            for name, rate in ways.items():
                rates[name].append(await rate(prompts.take(count)))
        return rates


def result_rows(rates: Mapping[str, Sequence[float]], count: int) -> list[Row]:
    rows = [Row(f"{count} at once, {name}", statistics.median(told), "tokens/s") for name, told in rates.items()]
    for name in (TRITON_FRONT, DYNAMO_FRONT):
        shares = [fleet / one for fleet, one in zip(rates[name], rates[ONE_SERVER], strict=True)]
        share = 100 * statistics.median(shares)
        rows.append(Row(f"{name}, of one server", share, "%", f">= {MIN_SHARE:g}", share >= MIN_SHARE))
    return rows


def main(
    output: Annotated[Path, typer.Option(help="Folder for fleet.csv and its plot.")] = Path("bench_results"),
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    rounds: Annotated[int, typer.Option(help="Repetitions of everything.")] = 5,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    model: Annotated[Path | None, typer.Option(help="Checkpoint to serve; default: the embedded model.")] = None,
) -> None:
    """Measure tokens/s at a server and at a fleet of one worker, which this command starts and stops."""
    console = Console()
    path = model or ensure_default_checkpoint()
    with started_server(path, console) as server, ExitStack() as resources:
        with console.status("starting a fleet"):
            fleet = resources.enter_context(DynamoFleet(path, MODEL))
            fleet.start_worker({})
            fleet.wait_ready(1)
            triton_front = fleet.start_triton_front({})
        addresses = {ONE_SERVER: server.grpc_url, TRITON_FRONT: triton_front, DYNAMO_FRONT: fleet.url}
        with Progress(console=console) as progress:
            rates = asyncio.run(measure(addresses, concurrency, prompt_tokens, output_tokens, rounds, progress))
    rows = result_rows(rates, concurrency)
    console.print(render(rows, f"{path.name}, streams, medians of {rounds} rounds, {threads_title()}"))
    write_results(rows, output, "fleet")
    console.print(f"results are in {output}; {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
