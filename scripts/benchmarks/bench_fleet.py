"""Measures the cost of the way through a fleet: tokens/s of requests that start together, at one server, and at one
worker behind a Triton front and behind Dynamo's own, all on this machine.

Each has an engine of its own; those that are not asked do nothing meanwhile. Rounds run in turn; medians are reported,
and of the shares the medians of the rounds.
"""

from __future__ import annotations

import asyncio
import json
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
from benchmarks.engine_tables import rows_table
from benchmarks.light_client import light_asks
from checkpoints.prepare_default_model import ensure_default_checkpoint
from marked_tables import write_table
from multilora_client import DIRECT
from multilora_client.bench.load import Ask
from multilora_client.bench.report import summarise
from multilora_client.bench.workload import Target
from plots import DOCS
from servers.dynamo_fleet import DynamoFleet
from servers.started_server import started_server
from sources import measured_source

MODEL = "bench"
MIN_SHARE = 90.0
"""The goal: percent of one server's tokens/s that are left behind router and front."""

_NUM_COMPARED = 4

ONE_SERVER, TRITON_FRONT, DYNAMO_FRONT = "one server", "worker behind a Triton front", "worker behind Dynamo's front"

Way = Callable[[Sequence[str]], Awaitable[tuple[float, list[str]]]]
"""Sends prompts at the same time: the tokens/s, and the answers."""


def through_triton(ask: Ask) -> Way:
    """Streams of gRPC."""

    async def send(prompts: Sequence[str]) -> tuple[float, list[str]]:
        samples = await run_wave(ask, [Target()] * len(prompts), prompts)
        if errors := {sample.error for sample in samples if not sample.is_answered}:
            raise RuntimeError(f"requests failed with {', '.join(sorted(errors))}")
        text_of = {sample.job.prompt: sample.text for sample in samples}
        return summarise(samples).tokens_per_s, [text_of[prompt] for prompt in prompts]

    return send


def through_openai(session: aiohttp.ClientSession, url: str, output_tokens: int) -> Way:
    """Streams of OpenAI's API, read when they have ended, as those of gRPC are."""

    async def ask(prompt: str) -> str:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0}
        async with session.post(f"{url}/v1/completions", json={**body, "ignore_eos": True, "stream": True}) as response:
            text = await response.text()
        if response.status != 200 or '"finish_reason":"length"' not in text:
            raise RuntimeError(f"a request failed with {response.status}: {text[-200:]}")
        return text

    async def send(prompts: Sequence[str]) -> tuple[float, list[str]]:
        started = time.perf_counter()
        streams = await asyncio.gather(*map(ask, prompts))
        seconds = time.perf_counter() - started
        return len(prompts) * output_tokens / seconds, list(map(_text_of, streams))

    return send


def _text_of(stream: str) -> str:
    """The answer in a stream of events."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


async def measure(
    addresses: Mapping[str, str], count: int, prompt_tokens: int, output_tokens: int, rounds: int, progress: Progress
) -> dict[str, list[float]]:
    """The tokens/s of each round. addresses: of each way to an engine."""
    async with AsyncExitStack() as resources:
        ways: dict[str, Way] = {}
        for name in (ONE_SERVER, TRITON_FRONT):
            (ask,) = await resources.enter_async_context(light_asks(addresses[name], (DIRECT,), output_tokens))
            ways[name] = through_triton(ask)
        timeout = aiohttp.ClientTimeout(total=600)
        connector = aiohttp.TCPConnector(limit=0)
        session = await resources.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        ways[DYNAMO_FRONT] = through_openai(session, addresses[DYNAMO_FRONT], output_tokens)
        prompts = FreshPrompts(prompt_tokens)
        await check_equal(ways, prompts.take(_NUM_COMPARED))
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in progress.track(range(rounds), description="rounds"):
            for name, send in ways.items():
                rates[name].append((await send(prompts.take(count)))[0])
        return rates


async def check_equal(ways: Mapping[str, Way], prompts: Sequence[str]) -> None:
    """Raises RuntimeError unless a prompt has the same answer whichever way it goes."""
    for prompt in prompts:
        texts = {name: (await send([prompt]))[1][0] for name, send in ways.items()}
        if len(set(texts.values())) > 1:
            raise RuntimeError(f"the answers to {prompt!r} differ: {texts}")


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
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/fleet.md.")] = False,
) -> None:
    """Measure tokens/s at a server and at a fleet of one worker, which this command starts and stops."""
    source = measured_source() if update_docs else ""
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
    if update_docs:
        write_table(DOCS / "fleet.md", "fleet ways", rows_table(rows), source)
    console.print(f"results are in {output}; {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
