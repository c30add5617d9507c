"""`multilora bench`: send the adapters, load the server stage by stage, report."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from multilora_client import doors
from multilora_client.adapter import Adapter
from multilora_client.bench.load import Load, Sample, make_ask, run_load
from multilora_client.bench.plot import plot as draw
from multilora_client.bench.report import (
    Stage,
    StepCounts,
    describe_knee,
    different_answers,
    find_knee,
    render,
    write_csv,
)
from multilora_client.bench.workload import (
    Job,
    Popularity,
    Target,
    clone_adapters,
    make_jobs,
    make_prompts,
    popularity_shares,
    uploaded_adapters,
)
from multilora_client.client import DEFAULT_URL, AsyncClient
from multilora_client.convert import load_adapter
from multilora_client.errors import AdapterConflict, InvalidRequest, MultiloraClientError, Unsupported
from multilora_client.terminal import Url, one_line_errors, print_table
from multilora_client.tls import Tls

_DOORS = {"direct": doors.DIRECT, "ensemble": doors.ENSEMBLE}
_NUM_CHECK_PROMPTS = 4
_UPLOADS_AT_ONCE = 4
_DEFAULT_CONCURRENCY = 4
_MAX_SHOWN = 5
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")

Door = Annotated[Literal["direct", "ensemble"], typer.Option(help="Ask the engine's own models, or the ensembles.")]
AdapterDirs = Annotated[
    list[Path] | None,
    typer.Option("--adapter", help="Directory of an adapter, PEFT or converted; may be repeated. Default: base model."),
]
NumAdapters = Annotated[
    int | None,
    typer.Option(min=1, help="Task ids to send the adapters under, in turn.", show_default="one for each --adapter"),
]
Uploaded = Annotated[
    bool,
    typer.Option("--uploaded", help="Send no adapter: the server has --num-adapters of them from --first-task-id on."),
]
FirstTaskId = Annotated[int, typer.Option(min=0, help="The first of these task ids.")]
PopularityOption = Annotated[
    Popularity | None,
    typer.Option(
        "--popularity",
        help="How often each task id is asked; by turn, requests at once ask different ones.",
        show_default="zipf, turn with --uploaded",
    ),
]
ZipfS = Annotated[float, typer.Option(min=0.0, help="Of zipf: the k-th adapter is asked in proportion to 1 / k**s.")]
Rates = Annotated[
    list[float] | None,
    typer.Option("--rate", help="Open loop: requests a second, arriving at random. Repeat to sweep rising loads."),
]
Concurrencies = Annotated[
    list[int] | None,
    typer.Option("--concurrency", min=1, help="Closed loop: requests at once. May be repeated.", show_default="4"),
]
NumRequests = Annotated[int, typer.Option(min=1, help="Requests of each load.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Common words of a prompt, a token each in most vocabularies.")]
OutputTokens = Annotated[int, typer.Option(min=1, help="Tokens of each answer.")]
NumPrompts = Annotated[
    int | None,
    typer.Option(min=1, help="Different prompts.", show_default=f"one a request, {_NUM_CHECK_PROMPTS} with --check"),
]
TimeoutS = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds after which a request has failed.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts, adapters and arrivals.")]
Check = Annotated[bool, typer.Option("--check", help="Fail when an adapter answers the same prompt in two ways.")]
CsvFile = Annotated[Path | None, typer.Option("--csv", help="Write a line for each request.", show_default=False)]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw the times, as .png, .svg or .pdf.", show_default=False)
]


def bench(
    ctx: typer.Context,
    url: Url = DEFAULT_URL,
    door: Door = "direct",
    adapter: AdapterDirs = None,
    num_adapters: NumAdapters = None,
    first_task_id: FirstTaskId = 1_000_000,
    uploaded: Uploaded = False,
    popularity: PopularityOption = None,
    zipf_s: ZipfS = 1.0,
    rate: Rates = None,
    concurrency: Concurrencies = None,
    num_requests: NumRequests = 100,
    prompt_tokens: PromptTokens = 128,
    output_tokens: OutputTokens = 64,
    num_prompts: NumPrompts = None,
    timeout: TimeoutS = 600.0,
    seed: Seed = 0,
    check: Check = False,
    csv: CsvFile = None,
    plot: PlotFile = None,
) -> None:
    """Load a running server with streams, and tell the times and errors that its clients would have met.

    All adapters are sent first. They stay on the server under their task ids, until it evicts them or is told to
    (`multilora adapters unload`). An adapter that is evicted during the load is sent again, and that time counts.

    With `--rate`, requests arrive at random moments (Poisson) and never wait for answers; times count from the moment
    at which a request was due. Of several rates the knee is named: the highest one up to which every request is
    answered and 90 % of the first tokens come within 3 times their time at the lowest rate: begin with a light
    load. `--check` also fails when another adapter answers than the requested one; numbers that depend on the
    batch (bfloat16, or a near tie) may differ without a fault. What a step held counts the requests of all clients.

    \b
    Examples:
      multilora bench --concurrency 1 --concurrency 8
      multilora bench --adapter adapters/pirate --adapter adapters/json --num-adapters 50 --rate 1 --rate 2 --rate 4
      multilora bench --adapter adapters/pirate --num-adapters 8 --check --csv requests.csv --plot bench.png
      multilora bench --uploaded --num-adapters 64 --first-task-id 0 --concurrency 64 --num-requests 256
    """
    with one_line_errors():
        loads = _loads(rate or [], concurrency or [])
        if plot:
            _check_plot(plot)
        targets = _targets(adapter or [], num_adapters, first_task_id, uploaded)
        popularity = popularity or ("turn" if uploaded else "zipf")
        num_jobs = num_requests * len(loads)
        prompts = make_prompts(num_prompts or (_NUM_CHECK_PROMPTS if check else num_jobs), prompt_tokens, seed)
        jobs = make_jobs(targets, popularity_shares(popularity, len(targets), zipf_s), prompts, num_jobs, seed)
        stages = asyncio.run(_run(url, ctx.obj, _DOORS[door], targets, jobs, loads, output_tokens, timeout, seed))
        samples = [sample for stage in stages for sample in stage.samples]
        if csv:
            write_csv(stages, csv)
        _check_answered(samples)
        print_table(render(stages))
        _explain_errors(samples)
        knee = find_knee(stages) if _is_sweep(stages) else None
        if _is_sweep(stages):
            typer.echo(describe_knee(stages, knee))
        if plot:
            draw(stages, knee, plot)
    if check and not _check_answers(samples):
        raise typer.Exit(1)


def _loads(rates: Sequence[float], concurrencies: Sequence[int]) -> list[Load]:
    if rates and concurrencies:
        raise InvalidRequest("--rate is an open loop and --concurrency a closed one; give one of them")
    if unusable := [rate for rate in rates if not 0 < rate < math.inf]:  # a NaN is neither
        raise InvalidRequest(f"--rate must be a number above 0, not {unusable[0]:g}")
    if rates:
        return [Load(rate, is_open=True) for rate in rates]
    return [Load(count, is_open=False) for count in concurrencies or [_DEFAULT_CONCURRENCY]]


def _is_sweep(stages: Sequence[Stage]) -> bool:
    return len(stages) > 1 and stages[0].load.is_open


def _check_plot(path: Path) -> None:
    if path.suffix not in _PLOT_SUFFIXES:
        raise InvalidRequest(f"--plot is {path}; its name must end with one of {', '.join(_PLOT_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise Unsupported("matplotlib is missing; install the extra: pip install './client[bench]' in a clone")


def _targets(directories: Sequence[Path], num_adapters: int | None, first_task_id: int, uploaded: bool) -> list[Target]:
    """The targets, most popular first; the base model alone without adapters."""
    if uploaded:
        if directories or num_adapters is None:
            raise InvalidRequest("--uploaded asks --num-adapters task ids that the server has, and sends no --adapter")
        return uploaded_adapters(num_adapters, first_task_id)
    if not directories:
        if num_adapters is not None:
            raise InvalidRequest("--num-adapters is how many task ids share the adapters; name one with --adapter")
        return [Target()]
    adapters = [(str(directory), load_adapter(directory, first_task_id)) for directory in directories]
    return clone_adapters(adapters, num_adapters or len(adapters), first_task_id)


async def _run(
    url: str,
    tls: Tls | None,
    door: doors.Door,
    targets: Sequence[Target],
    jobs: Sequence[Job],
    loads: Sequence[Load],
    output_tokens: int,
    timeout_s: float,
    seed: int,
) -> list[Stage]:
    """Send the adapters, then one load after the other, each with its share of the jobs."""
    async with AsyncClient(url, door=door, tls=tls) as client:
        await _upload(client, [target.adapter for target in targets if isinstance(target.adapter, Adapter)])
        ask = make_ask(client, output_tokens, timeout_s)
        size = len(jobs) // len(loads)
        stages = []
        for number, load in enumerate(loads):
            with _progress(str(load), size) as advance:
                share = jobs[number * size : (number + 1) * size]
                before = await _read_steps(client)
                samples = await run_load(ask, share, load, seed, advance)
            stages.append(Stage(load, samples, (await _read_steps(client)).since(before)))
    return stages


async def _read_steps(client: AsyncClient) -> StepCounts:
    """Nothing where the server does not tell: an older one, or one whose key allows no such question."""
    try:
        return StepCounts.of(await client.adapter_stats())
    except MultiloraClientError:
        return StepCounts()


async def _upload(client: AsyncClient, adapters: Sequence[Adapter]) -> None:
    remaining = iter(adapters)
    with _progress("sending adapters", len(adapters)) as advance:

        async def work() -> None:
            for adapter in remaining:
                await client.upload(adapter)
                advance()

        await asyncio.gather(*(work() for _ in range(_UPLOADS_AT_ONCE)))


@contextmanager
def _progress(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere. Yields a function that moves it on by one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def _check_answered(samples: Sequence[Sample]) -> None:
    """Raises MultiloraClientError, with the commonest code, when every request failed."""
    if not any(sample.is_answered for sample in samples):
        errors = Counter((sample.error, sample.reason) for sample in samples).most_common(_MAX_SHOWN)
        told = "; ".join(f"{reason} ({count} times)" for (_, reason), count in errors)
        raise MultiloraClientError(f"none of {len(samples)} requests was answered: {told}", code=errors[0][0][0])


def _explain_errors(samples: Sequence[Sample]) -> None:
    """Print the first error of each code in words: the table has the codes."""
    reasons = {sample.error: sample.reason for sample in reversed(samples) if not sample.is_answered}
    for code, reason in reasons.items():
        typer.echo(f"{code}, such as: {reason}", err=True)


def _check_answers(samples: Sequence[Sample]) -> bool:
    """Whether all answers are as they should be; prints the first few that are not."""
    different = different_answers(samples)
    for first, other in different[:_MAX_SHOWN]:
        who = other.job.target.content or "the base model"
        typer.echo(f"{who} answered {first.text!r}, then {other.text!r} to the same prompt", err=True)
    num_answered = sum(sample.is_answered for sample in samples)
    typer.echo(f"{len(different)} of {num_answered} answers differ from the first one to the same prompt")
    num_conflicts = sum(sample.error == AdapterConflict.code for sample in samples)
    if num_conflicts:
        typer.echo(f"{num_conflicts} requests were answered by another adapter than the one they asked for", err=True)
    return not different and not num_conflicts
