"""Measures requests through the real server, with all its processes and this client on the same machine.

adapters   tokens/s of 1, 8 and 16 requests that start together: without adapters, with one, with one each
doors      tokens/s of the same requests in this process (the engine alone), through `generation` and through `ensemble`
cost       CPU milliseconds that a token of these takes in each process it passes through, this client included
quantized  tokens/s as of `doors`, one request and the most at once, of the default model in w4a16
load       time to the first token and between tokens at rising rates of requests that arrive at random, through
           `ensemble`, with as many adapters as requests at most, asked by Zipf's law; and the knee

All answers are streams. What is compared runs in turn, round after round, so that what else the machine does hits all
of it; medians are reported. The load is that of `multilora bench`, by a client that leaves the CPUs to the server.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.adapter_bench import random_wire
from benchmarks.cpu_times import CpuTimes, seconds_between
from benchmarks.engine_in_process import EngineInProcess
from benchmarks.light_client import light_asks
from benchmarks.results import Row, at_least, report, threads_title
from marked_tables import figure, markdown_table, write_table
from multilora_client import DIRECT, ENSEMBLE, Adapter, AdapterTensors, AsyncClient
from multilora_client.bench.load import Ask, Load, Sample, run_closed, run_load
from multilora_client.bench.report import Stage, describe_knee, find_knee, summarise, write_csv
from multilora_client.bench.report import render as render_stages
from multilora_client.bench.workload import Job, Target, make_jobs, make_prompts, popularity_shares
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.quickstart.default_model import ensure_default_checkpoint
from multilora_engine.quickstart.quantized_default_model import SchemeName, ensure_quantized_checkpoint
from multilora_engine.tritonserver import ServerProcess
from plots import PERFORMANCE, write_plots
from servers.started_server import started_server
from sources import measured_source

ADAPTER_MIXES = ("no adapter", "one adapter", "all different")
PARTS = ("adapters", "doors", "cost", "quantized", "load")
MIN_ENSEMBLE_SHARE, MIN_QUANTIZED_SHARE = 90.0, 85.0
"""The goals: percent of the tokens/s in this process that come through `ensemble`; steps of quantised weights are
shorter."""
QUANTIZED: SchemeName = "w4a16"
MIN_COST_MS = 0.005
"""CPU milliseconds a token below which a process is not listed."""
_HERE, _DIRECT, _ENSEMBLE = "in this process", "through generation", "through ensemble"
"""The doors."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Setting:
    """The settings that all parts share. concurrency: requests at once, rising; the last is that of `doors`.

    load_seconds: the time that requests arrive at each rate; beyond the knee, the longer, the more requests wait.
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

    def add(self, what: str, samples: Sequence[Sample], cpu_seconds: Mapping[str, float] | None = None) -> None:
        """Add one round: its rates, or with cpu_seconds, by process, its costs.

        Raises RuntimeError when a request was not answered: the rest would look faster for it.
        """
        if errors := {sample.error for sample in samples if not sample.is_answered}:
            raise RuntimeError(f"{what}: requests failed with {', '.join(sorted(errors))}")
        if cpu_seconds is None:
            self.rates.setdefault(what, []).append(summarise(samples).tokens_per_s)
            self.first.setdefault(what, []).extend(sample.first_token_s for sample in samples)
        else:
            num_tokens = sum(sample.num_output_tokens for sample in samples)
            per_token = {name: 1e3 * value / num_tokens for name, value in cpu_seconds.items()}
            self.costs.setdefault(what, []).append(per_token)


def random_adapter(model: Path, lora_task_id: int, rank: int) -> Adapter:
    """Small random numbers on every linear layer, float16: their answers do not matter here."""
    weights, config = random_wire(checkpoint_layout(model, rank, "float16"), rank, lora_task_id)
    return Adapter(lora_task_id, AdapterTensors(weights.numpy().astype(np.float16), config.numpy(), "FP16"))


def mixed_targets(mix: str, count: int, adapters: Sequence[Target]) -> list[Target]:
    """The target that each of `count` requests asks."""
    if mix == "no adapter":
        return [Target()] * count
    return [adapters[0]] * count if mix == "one adapter" else list(adapters[:count])


class Measurement:
    """The parts, of a server that does nothing else. asks: by door. adapters: that the server has."""

    def __init__(self, setting: Setting, asks: Mapping[str, Ask], adapters: Sequence[Target], bar: Progress) -> None:
        self.results = Results()
        self._setting = setting
        self._asks = asks
        self._adapters = adapters
        self._bar = bar
        self._seeds = itertools.count()

    def fresh_prompts(self, count: int) -> list[str]:
        """Prompts that no cache has seen."""
        return make_prompts(count, self._setting.prompt_tokens, next(self._seeds))

    async def wave(self, door: str, targets: Sequence[Target]) -> list[Sample]:
        """Send a request to each target at the same time, once."""
        prompts = self.fresh_prompts(len(targets))
        jobs = [Job(target, prompt) for target, prompt in zip(targets, prompts, strict=True)]
        return await run_closed(self._asks[door], jobs, len(jobs), lambda: None)

    async def adapters(self) -> None:
        for count, mix in self._rounds("adapters", itertools.product(self._setting.concurrency, ADAPTER_MIXES)):
            self.results.add(
                measurement(count, mix), await self.wave(_DIRECT, mixed_targets(mix, count, self._adapters))
            )

    async def doors(self, count: int) -> None:
        """Measure the doors without adapters; no client asks the server while the engine of this process works."""
        with closing(EngineInProcess(self._setting.model)) as engine:
            engine.tokens_per_s(self.fresh_prompts(count), 2)
            for door in self._rounds(f"doors, {count} at once", [_HERE, *self._asks]):
                if door == _HERE:
                    rate = engine.tokens_per_s(self.fresh_prompts(count), self._setting.output_tokens)
                    self.results.rates.setdefault(_HERE, []).append(rate)
                else:
                    self.results.add(door, await self.wave(door, [Target()] * count))

    async def cost(self, cpu_times: CpuTimes) -> None:
        """Measure the CPU time without adapters, from the sending of the requests until the last answer is whole."""
        for door in self._rounds("cost", self._asks):
            before = cpu_times.read()
            samples = await self.wave(door, [Target()] * self._setting.concurrency[-1])
            self.results.add(door, samples, seconds_between(before, cpu_times.read()))

    async def load(self) -> None:
        shares = popularity_shares("zipf", len(self._adapters), 1.0)
        for load in [Load(rate, is_open=True) for rate in self._setting.rates]:
            count = round(load.level * self._setting.load_seconds)
            jobs = make_jobs(self._adapters, shares, self.fresh_prompts(count), count, seed=0)
            advance = partial(self._bar.advance, self._bar.add_task(str(load), total=count))
            self.results.stages.append(Stage(load, await run_load(self._asks[_ENSEMBLE], jobs, load, 0, advance)))

    def _rounds(self, what: str, each: Iterable[_Item]) -> Iterator[_Item]:
        items = list(each) * self._setting.rounds
        yield from self._bar.track(items, description=what)


async def measure(server: ServerProcess, setting: Setting, parts: Sequence[str], bar: Progress) -> Results:
    """Measure these parts, `quantized` aside."""
    adapters = [
        Target(random_adapter(setting.model, 1 + i, setting.rank), f"random {i}")
        for i in range(max(setting.concurrency))
    ]
    async with AsyncClient(f"grpc://{server.grpc_url}") as client:
        for target in bar.track(adapters, description="sending adapters"):
            assert isinstance(target.adapter, Adapter)
            await client.upload(target.adapter)
    async with light_asks(server.grpc_url, (DIRECT, ENSEMBLE), setting.output_tokens) as (direct, ensemble):
        measurements = Measurement(setting, {_DIRECT: direct, _ENSEMBLE: ensemble}, adapters, bar)
        await measurements.wave(_DIRECT, [Target(), adapters[0]])
        if "adapters" in parts:
            await measurements.adapters()
        if "doors" in parts:
            await measurements.doors(setting.concurrency[-1])
        if "cost" in parts:
            await measurements.cost(CpuTimes(server.pid))
        if "load" in parts:
            await measurements.load()
    return measurements.results


async def measure_quantized(server: ServerProcess, setting: Setting, bar: Progress) -> list[Row]:
    """Measure the doors of a quantised model, which the setting names: one request, and the most at once."""
    rows: list[Row] = []
    async with light_asks(server.grpc_url, (DIRECT, ENSEMBLE), setting.output_tokens) as (direct, ensemble):
        for count in sorted({setting.concurrency[0], setting.concurrency[-1]}):
            measurements = Measurement(setting, {_DIRECT: direct, _ENSEMBLE: ensemble}, [], bar)
            await measurements.wave(_ENSEMBLE, [Target()] * count)
            await measurements.doors(count)
            rows += rate_rows(measurements.results, MIN_QUANTIZED_SHARE, f"{QUANTIZED}, {count} at once: ")
    return rows


def result_rows(results: Results) -> list[Row]:
    """The medians, and the share of the engine's tokens/s that the ensemble keeps."""
    first = [
        Row(f"first token, {what}", statistics.median(seconds) * 1e3, "ms") for what, seconds in results.first.items()
    ]
    costs = [row for what, costs in results.costs.items() for row in cost_rows(what, costs)]
    return [*rate_rows(results, MIN_ENSEMBLE_SHARE), *first, *costs]


def rate_rows(results: Results, goal: float, prefix: str = "") -> list[Row]:
    """The medians of tokens/s; of doors the percent of the engine's that come through the ensemble, round by round."""
    rows = [Row(f"{prefix}{what}", statistics.median(rates), "tokens/s") for what, rates in results.rates.items()]
    if _HERE in results.rates:
        pairs = zip(results.rates[_HERE], results.rates[_ENSEMBLE], strict=True)
        share = 100 * statistics.median(ensemble / alone for alone, ensemble in pairs)
        rows.append(at_least(f"{prefix}ensemble, of in this process", share, "%", goal))
    return rows


def cost_rows(what: str, costs: Sequence[Mapping[str, float]]) -> list[Row]:
    """The median of each process that does anything, the dearest first, and the median of their sum."""
    medians = {name: statistics.median(cost[name] for cost in costs) for name in costs[0]}
    working = sorted((item for item in medians.items() if item[1] >= MIN_COST_MS), key=lambda item: -item[1])
    total = statistics.median(sum(cost.values()) for cost in costs)
    return [Row(f"{name}, {what}", value, "CPU ms/token") for name, value in (*working, ("all of it", total))]


def write_tables(results: Results, counts: Sequence[int], source: str) -> None:
    """Write what was measured into docs/performance.md, and draw its plots anew.

    counts: requests at once. source: the sentence that tells where figures are from.
    """
    if measurement(counts[0], ADAPTER_MIXES[0]) in results.rates:
        write_table(PERFORMANCE, "throughput", throughput_table(results.rates, counts), source)
    if results.stages:
        write_table(PERFORMANCE, "load", load_table(results.stages), source)
    write_plots(PERFORMANCE)


def measurement(count: int, mix: str) -> str:
    """How the results call `count` requests at once of these adapters."""
    return f"{count} at once, {mix}"


def throughput_table(rates: Mapping[str, Sequence[float]], counts: Sequence[int]) -> str:
    """Medians of tokens/s: a row for each number of requests at once."""
    columns = ("requests at once", *ADAPTER_MIXES, "")
    medians = [[figure(statistics.median(rates[measurement(n, mix)])) for mix in ADAPTER_MIXES] for n in counts]
    rows = [(str(count), *of_count, "tokens/s") for count, of_count in zip(counts, medians, strict=True)]
    return markdown_table(columns, rows, numbers=range(len(columns) - 1))


def load_table(stages: Sequence[Stage]) -> str:
    """Percentiles of the times to the first token and between tokens: a row for each rate of requests."""
    columns = ("requests a second", "first token p50", "first token p99", "between tokens p50", "between tokens p99")
    rows = []
    for stage in stages:
        summary = summarise(stage.samples)
        times = [time for of in (summary.first_token, summary.gap) for time in (of.p50, of.p99)]
        rows.append((f"{stage.load.level:g}", *map(_time, times)))
    return markdown_table(columns, rows, numbers=range(len(columns)))


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def main(
    output: Annotated[Path, typer.Option(help="Folder for serving.csv and serving_load.csv.")] = Path("bench_results"),
    part: Annotated[list[str], typer.Option(help=f"Measure only this: {', '.join(PARTS)}.")] = [],  # noqa: B006
    concurrency: Annotated[list[int], typer.Option(help="Requests at once; repeat for several, rising.")] = [1, 8, 16],  # noqa: B006
    rate: Annotated[list[float], typer.Option(help="Requests a second of the load; repeat.")] = [1, 2, 3, 4, 6],  # noqa: B006
    load_seconds: Annotated[float, typer.Option(help="Seconds that requests arrive at each rate.")] = 30,
    rounds: Annotated[int, typer.Option(help="Repetitions of everything that is compared.")] = 3,
    rank: Annotated[int, typer.Option(help="Rank of the adapters, which are on all linear layers.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    model: Annotated[Path | None, typer.Option(help="Checkpoint to serve; default: the embedded model.")] = None,
    update_docs: Annotated[
        bool, typer.Option("--docs", help="Write the tables and plots of docs/performance.md; its text is yours.")
    ] = False,
) -> None:
    """Measure tokens/s and times through a server that this command starts and stops."""
    if unknown := set(part) - set(PARTS):
        raise typer.BadParameter(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
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
    serve = partial(started_server, console=console)
    if chosen := [name for name in PARTS if name in (part or PARTS) and name != "quantized"]:
        with serve(setting.model) as server, Progress(console=console) as progress:
            results = asyncio.run(measure(server, setting, chosen, progress))
    if "quantized" in (part or PARTS):
        coded = replace(setting, model=ensure_quantized_checkpoint(QUANTIZED))
        with serve(coded.model) as server, Progress(console=console) as progress:
            quantized = asyncio.run(measure_quantized(server, coded, progress))
    if results.stages:
        report_load(results.stages, output, console)
    if rows := [*result_rows(results), *quantized]:
        title = f"{setting.model.name}, medians, {threads_title()}"
        report(rows, title, output, "serving", console)
    if update_docs:
        write_tables(results, setting.concurrency, source)


def report_load(stages: Sequence[Stage], output: Path, console: Console) -> None:
    output.mkdir(parents=True, exist_ok=True)
    table = render_stages(stages)
    table.caption = describe_knee(stages, find_knee(stages))
    console.print(table)
    write_csv(stages, output / "serving_load.csv")
