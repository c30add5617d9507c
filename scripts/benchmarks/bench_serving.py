"""Measures requests through the real server, with all its processes and this client on the same machine.

adapters   tokens/s of 1, 8 and 16 requests that start together: without adapters, with one, with one each
doors      tokens/s of the same requests in this process (the engine alone), through `generation` and through `ensemble`
cost       CPU milliseconds that a token of these takes in each process it passes through, this client included
quantized  tokens/s as of `doors`, one request and the most at once, of the default model in w4a16
load       time to the first token and between tokens at rising rates of requests that arrive at random, through
           `ensemble`, with as many adapters as requests at most, asked by Zipf's law; and the knee

All answers are streams. What is compared runs in turn, round after round, so that what else the machine does hits all
of it; medians are reported. The load is that of `multilora bench`, by a client that leaves the
CPUs to the server.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from benchmarks.bench_rows import Row, render, threads_title, write_results
from benchmarks.cpu_times import CpuTimes, seconds_between
from benchmarks.light_client import light_asks
from benchmarks.serving_tables import measurement, write_tables
from checkpoints.prepare_default_model import ensure_default_checkpoint
from checkpoints.quantized_default_model import SchemeName, ensure_quantized_checkpoint
from multilora_client import DIRECT, ENSEMBLE, Adapter, AdapterTensors, AsyncClient
from multilora_client.bench.load import Ask, Load, Sample, run_closed, run_load
from multilora_client.bench.plot import plot
from multilora_client.bench.report import Stage, describe_knee, find_knee, summarise, write_csv
from multilora_client.bench.report import render as render_stages
from multilora_client.bench.workload import Job, Target, make_jobs, make_prompts, popularity_shares
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.tritonserver import ServerProcess
from multilora_wire.layout import num_values
from servers.started_server import started_server
from sources import measured_source

ADAPTER_MIXES = ("no adapter", "one adapter", "all different")
PARTS = ("adapters", "doors", "cost", "quantized", "load")
MIN_ENSEMBLE_SHARE = 90.0
"""The goal: percent of the tokens/s in this process that come through `ensemble`."""
MIN_QUANTIZED_SHARE = 85.0
"""The same goal with quantised weights, whose steps are shorter."""
QUANTIZED: SchemeName = "w4a16"
MIN_COST_MS = 0.005
"""CPU milliseconds a token below which a process is not listed."""
_HERE, _DIRECT, _ENSEMBLE = "in this process", "through generation", "through ensemble"
"""The doors."""


@dataclass(frozen=True)
class Setting:
    """The settings that all parts share. concurrency: requests at once, rising; the last is that of `doors`.

    load_seconds: the time that requests arrive at each rate; behind the knee, the longer, the more requests wait.
    """

    model: Path
    concurrency: Sequence[int]
    rates: Sequence[float]
    load_seconds: float
    rounds: int
    rank: int
    prompt_tokens: int
    output_tokens: int


@dataclass
class Results:
    """rates: tokens/s of every round by measurement. first: seconds to the first tokens. stages: of the load.

    costs: of every round the CPU milliseconds of a token by process, by measurement.
    """

    rates: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, list[float]] = field(default_factory=dict)
    costs: dict[str, list[Mapping[str, float]]] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)

    def add_cost(self, what: str, samples: Sequence[Sample], seconds: Mapping[str, float]) -> None:
        """Add one round; seconds: CPU time by process. Raises RuntimeError as `add` does."""
        _check_answered(what, samples)
        num_tokens = sum(sample.num_output_tokens for sample in samples)
        self.costs.setdefault(what, []).append({name: 1e3 * value / num_tokens for name, value in seconds.items()})

    def add(self, what: str, samples: Sequence[Sample]) -> None:
        """Add one round. Raises RuntimeError when a request was not answered: the rest would look faster for it."""
        _check_answered(what, samples)
        self.rates.setdefault(what, []).append(summarise(samples).tokens_per_s)
        self.first.setdefault(what, []).extend(sample.first_token_s for sample in samples)


def _check_answered(what: str, samples: Sequence[Sample]) -> None:
    if errors := {sample.error for sample in samples if not sample.is_answered}:
        raise RuntimeError(f"{what}: requests failed with {', '.join(sorted(errors))}")


class FreshPrompts:
    """Prompts that no cache has seen."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._seeds = itertools.count()

    def take(self, count: int) -> list[str]:
        return make_prompts(count, self._num_tokens, next(self._seeds))


class EngineInProcess:
    """The engine as the server configures it, without anything around it."""

    def __init__(self, model: Path) -> None:
        self._engine = Engine(EngineConfig.model_validate({"model_path": model}))
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._request_ids = itertools.count()

    def close(self) -> None:
        self._engine.close()

    def tokens_per_s(self, prompts: Sequence[str], output_tokens: int) -> float:
        """The tokens/s of all prompts at once, until the last answer is whole."""
        started, num_tokens = time.perf_counter(), 0
        for prompt in prompts:
            sampling = SamplingParams(max_tokens=output_tokens, end_id=-1)
            token_ids = self._tokenizer.encode(prompt).ids
            self._engine.add_request(GenerationRequest(f"bench-{next(self._request_ids)}", token_ids, sampling))
        while self._engine.has_work:
            num_tokens += sum(len(output.token_ids) for output in self._engine.step())
        return num_tokens / (time.perf_counter() - started)


def random_adapter(model: Path, lora_task_id: int, rank: int) -> Adapter:
    """Small random numbers on every linear layer, float16: their answers do not matter here."""
    layout = checkpoint_layout(model, rank, "float16")
    modules = layout.sites.plain_modules
    config = np.array([[module.module_id, module.layer, rank, 0] for module in modules], np.int32)
    width = max(num_values(module, rank) for module in modules)
    weights = np.zeros((len(config), width), np.float16)
    rng = np.random.default_rng(lora_task_id)
    for row, module in zip(weights, modules, strict=True):
        size = num_values(module, rank)
        row[:size] = rng.standard_normal(size, np.float32) * 0.01
    return Adapter(lora_task_id, AdapterTensors(weights, config, "FP16"))


def mixed_targets(mix: str, count: int, adapters: Sequence[Target]) -> list[Target]:
    """The target that each of `count` requests asks."""
    if mix == "no adapter":
        return [Target()] * count
    return [adapters[0]] * count if mix == "one adapter" else list(adapters[:count])


async def run_wave(ask: Ask, targets: Sequence[Target], prompts: Sequence[str]) -> list[Sample]:
    """Send all requests at the same time, once."""
    jobs = [Job(target, prompt) for target, prompt in zip(targets, prompts, strict=True)]
    return await run_closed(ask, jobs, len(jobs), lambda: None)


async def measure(server: ServerProcess, setting: Setting, parts: Sequence[str], progress: Progress) -> Results:
    """Measure all parts, on a server that does nothing else."""
    results, most = Results(), max(setting.concurrency)
    adapters = [Target(random_adapter(setting.model, 1 + i, setting.rank), f"random {i}") for i in range(most)]
    async with AsyncClient(f"grpc://{server.grpc_url}") as client:
        for target in progress.track(adapters, description="sending adapters"):
            assert target.adapter is not None
            await client.upload(target.adapter)
    async with light_asks(server.grpc_url, (DIRECT, ENSEMBLE), setting.output_tokens) as (direct, ensemble):
        prompts = FreshPrompts(setting.prompt_tokens)
        await run_wave(direct, [Target(), adapters[0]], prompts.take(2))
        if "adapters" in parts:
            await measure_adapters(direct, setting, adapters, prompts, results, progress)
        asks = {_DIRECT: direct, _ENSEMBLE: ensemble}
        if "doors" in parts:
            with engine_in_process(setting.model) as engine:
                await measure_doors(engine, asks, setting, setting.concurrency[-1], prompts, results, progress)
        if "cost" in parts:
            await measure_cost(asks, CpuTimes(server.pid), setting, prompts, results, progress)
        if "load" in parts:
            await measure_load(ensemble, setting, adapters, prompts, results, progress)
    return results


async def measure_adapters(
    ask: Ask,
    setting: Setting,
    adapters: Sequence[Target],
    prompts: FreshPrompts,
    results: Results,
    progress: Progress,
) -> None:
    cells = list(itertools.product(setting.concurrency, ADAPTER_MIXES))
    rounds = list(itertools.product(range(setting.rounds), cells))
    for _, (count, mix) in progress.track(rounds, description="adapters"):
        samples = await run_wave(ask, mixed_targets(mix, count, adapters), prompts.take(count))
        results.add(measurement(count, mix), samples)


async def measure_doors(
    engine: EngineInProcess,
    asks: Mapping[str, Ask],
    setting: Setting,
    count: int,
    prompts: FreshPrompts,
    results: Results,
    progress: Progress,
) -> None:
    """Measure the doors without adapters; no client asks the server while the engine of this process works."""
    engine.tokens_per_s(prompts.take(count), 2)
    for _ in progress.track(range(setting.rounds), description=f"doors, {count} at once"):
        rate = engine.tokens_per_s(prompts.take(count), setting.output_tokens)
        results.rates.setdefault(_HERE, []).append(rate)
        for name, ask in asks.items():
            results.add(name, await run_wave(ask, [Target()] * count, prompts.take(count)))


async def measure_quantized(server: ServerProcess, setting: Setting, progress: Progress) -> list[Row]:
    """Measure the doors of a quantised model, which the setting names: one request, and the most at once."""
    prompts, rows = FreshPrompts(setting.prompt_tokens), list[Row]()
    async with light_asks(server.grpc_url, (DIRECT, ENSEMBLE), setting.output_tokens) as (direct, ensemble):
        asks = {_DIRECT: direct, _ENSEMBLE: ensemble}
        with engine_in_process(setting.model) as engine:
            for count in sorted({setting.concurrency[0], setting.concurrency[-1]}):
                await run_wave(ensemble, [Target()] * count, prompts.take(count))
                results = Results()
                await measure_doors(engine, asks, setting, count, prompts, results, progress)
                rows += quantized_rows(f"{QUANTIZED}, {count} at once", results)
    return rows


async def measure_cost(
    asks: Mapping[str, Ask],
    cpu_times: CpuTimes,
    setting: Setting,
    prompts: FreshPrompts,
    results: Results,
    progress: Progress,
) -> None:
    """Measure the CPU time without adapters, from the sending of the requests until the last answer is whole."""
    count = setting.concurrency[-1]
    rounds = list(itertools.product(range(setting.rounds), asks.items()))
    for _, (name, ask) in progress.track(rounds, description="cost"):
        texts = prompts.take(count)
        before = cpu_times.read()
        samples = await run_wave(ask, [Target()] * count, texts)
        results.add_cost(name, samples, seconds_between(before, cpu_times.read()))


@contextmanager
def engine_in_process(model: Path) -> Iterator[EngineInProcess]:
    engine = EngineInProcess(model)
    try:
        yield engine
    finally:
        engine.close()


async def measure_load(
    ask: Ask,
    setting: Setting,
    adapters: Sequence[Target],
    prompts: FreshPrompts,
    results: Results,
    progress: Progress,
) -> None:
    shares = popularity_shares("zipf", len(adapters), 1.0)
    for load in [Load(rate, is_open=True) for rate in setting.rates]:
        count = round(load.level * setting.load_seconds)
        jobs = make_jobs(adapters, shares, prompts.take(count), count, seed=0)
        advance = partial(progress.advance, progress.add_task(str(load), total=count))
        results.stages.append(Stage(load, await run_load(ask, jobs, load, 0, advance)))


def result_rows(results: Results) -> list[Row]:
    """The medians, and the share of the engine's tokens/s that the ensemble keeps."""
    rows = [Row(what, statistics.median(rates), "tokens/s") for what, rates in results.rates.items()]
    rows += [
        Row(f"first token, {what}", statistics.median(seconds) * 1e3, "ms") for what, seconds in results.first.items()
    ]
    if _HERE in results.rates:
        rows.append(share_row("ensemble, of in this process", results, MIN_ENSEMBLE_SHARE))
    return rows + [row for what, costs in results.costs.items() for row in cost_rows(what, costs)]


def quantized_rows(name: str, results: Results) -> list[Row]:
    """The medians of each door, and the share of the engine's tokens/s that the ensemble keeps."""
    rows = [Row(f"{name}: {what}", statistics.median(rates), "tokens/s") for what, rates in results.rates.items()]
    return [*rows, share_row(f"{name}: ensemble, of in this process", results, MIN_QUANTIZED_SHARE)]


def share_row(what: str, results: Results, goal: float) -> Row:
    """The percent of the engine's tokens/s that come through the ensemble: the median of all rounds."""
    alone, ensemble = results.rates[_HERE], results.rates[_ENSEMBLE]
    share = 100 * statistics.median(b / a for a, b in zip(alone, ensemble, strict=True))
    return Row(what, share, "%", f">= {goal:g}", share >= goal)


def cost_rows(what: str, costs: Sequence[Mapping[str, float]]) -> list[Row]:
    """The median of each process that does anything, the dearest first, and the median of their sum."""
    medians = {name: statistics.median(cost[name] for cost in costs) for name in costs[0]}
    working = sorted((item for item in medians.items() if item[1] >= MIN_COST_MS), key=lambda item: -item[1])
    total = statistics.median(sum(cost.values()) for cost in costs)
    return [Row(f"{name}, {what}", value, "CPU ms/token") for name, value in (*working, ("all of it", total))]


def main(
    output: Annotated[Path, typer.Option(help="Folder for serving.csv, serving_load.csv and their plots.")] = Path(
        "bench_results"
    ),
    part: Annotated[list[str], typer.Option(help=f"Measure only this: {', '.join(PARTS)}.")] = [],  # noqa: B006
    concurrency: Annotated[list[int], typer.Option(help="Requests at once; repeat for several, rising.")] = [1, 8, 16],  # noqa: B006
    rate: Annotated[list[float], typer.Option(help="Requests a second of the load; repeat.")] = [1, 2, 3, 4, 6],  # noqa: B006
    load_seconds: Annotated[float, typer.Option(help="Seconds that requests arrive at each rate.")] = 30,
    rounds: Annotated[int, typer.Option(help="Repetitions of everything that is compared.")] = 3,
    rank: Annotated[int, typer.Option(help="Rank of the adapters, which are on all linear layers.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    stream_interval: Annotated[int, typer.Option(help="The server's `stream_interval`: tokens of a response.")] = 1,
    model: Annotated[Path | None, typer.Option(help="Checkpoint to serve; default: the embedded model.")] = None,
    update_docs: Annotated[
        bool, typer.Option("--docs", help="Write the tables and plots of docs/performance.md; its text is yours.")
    ] = False,
) -> None:
    """Measure tokens/s and times through a server that this command starts and stops, and plot them."""
    if unknown := set(part) - set(PARTS):
        raise typer.BadParameter(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if update_docs and stream_interval != 1:
        raise typer.BadParameter("--docs writes the tables of the default stream_interval, 1")
    source = measured_source() if update_docs else ""
    console = Console()
    setting = Setting(
        model=model or ensure_default_checkpoint(),
        concurrency=sorted(concurrency),
        rates=sorted(rate),
        load_seconds=load_seconds,
        rounds=rounds,
        rank=rank,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    results, quantized = Results(), list[Row]()
    serve = partial(started_server, console=console, overrides={"stream_interval": str(stream_interval)})
    if chosen := [name for name in PARTS if name in (part or PARTS) and name != "quantized"]:
        with serve(setting.model) as server, Progress(console=console) as progress:
            results = asyncio.run(measure(server, setting, chosen, progress))
    if "quantized" in (part or PARTS):
        coded = replace(setting, model=ensure_quantized_checkpoint(QUANTIZED))
        with serve(coded.model) as server, Progress(console=console) as progress:
            quantized = asyncio.run(measure_quantized(server, coded, progress))
    rows = result_rows(results)
    if rows or quantized:
        title = f"{setting.model.name}, streams of {stream_interval} tokens a response, medians, {threads_title()}"
        console.print(render([*rows, *quantized], title))
        write_results([*rows, *quantized], output, "serving")
    if results.stages:
        report_load(results.stages, output, console)
    if update_docs:
        write_tables(results.rates, setting.concurrency, results.stages, source)
    console.print(f"results are in {output}; {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


def report_load(stages: Sequence[Stage], output: Path, console: Console) -> None:
    output.mkdir(parents=True, exist_ok=True)
    knee = find_knee(stages)
    table = render_stages(stages)
    table.caption = describe_knee(stages, knee)
    console.print(table)
    write_csv(stages, output / "serving_load.csv")
    plot(stages, knee, output / "serving_load.png")
