"""Loads a fleet of Dynamo through both its fronts, with adapters by Zipf that come, move and go meanwhile, kills
workers, cuts one off, and shows the answers that clients got in a table and a picture.

The adapters are those of telling_adapters.py: an answer says which adapter, in which version, gave it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from checkpoints.telling_adapters import MAX_RANK, PROMPT_TOKENS, save_checkpoint
from marked_tables import markdown_table, write_table
from multilora_client import Client
from plots import DOCS, IMAGES
from servers.dynamo_fleet import DynamoFleet
from servers.machines import Machines, can_make_machines
from servers.started_server import sigterm_as_ctrl_c
from sources import measured_source
from trials.fleet_judge import Judge, OpenAIDoor, Outcome, Tally, TritonDoor, Versions, adapter_name
from trials.fleet_operator import FleetOperator, is_loaded_by_hand, save_adapter
from trials.fleet_picture import draw

BASE = "telling"
PARTITION_S = 10
SETTLE_S = 5.0
"""A worker that was cut off asks another worker for news every two seconds."""

PARAMETERS = {
    "kv_cache_memory_bytes": "16MiB",
    "max_num_seqs": "16",
    "num_threads": "1",
    "max_lora_rank": str(MAX_RANK),
}

FAULTS = ("wrong", "base", "unstated")

PAGE = DOCS / "fleet.md"
PHASE_COLUMNS = (
    "phase",
    "right",
    "earlier",
    "wrong",
    "from the base",
    "unloaded",
    "UNAVAILABLE",
    "other errors",
    "p50 ms",
    "p95 ms",
    "prefix hits",
)
ROUTING_COLUMNS = ("routing", "prefix hits", "adapter in memory", "p50 ms", "p95 ms")


@dataclass
class Trial:
    """begun: the time at which each phase began. names: of the workers, by their numbers in the fleet."""

    fleet: DynamoFleet
    parameters: Mapping[str, str]
    judge: Judge
    versions: Versions
    operator: FleetOperator
    num_requests: int
    num_clients: int
    begun: dict[str, float] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def phases(self, console: Console) -> Iterator[Tally]:
        """Hurt the fleet at the beginning of phases; the tally of each phase's clients."""
        steps: Mapping[str, Callable[[], None]] = {
            "all workers": lambda: None,
            "kill -9 of a worker": lambda: self._kill(0),
            "another worker comes": self._replace,
            "kill -9 of a second one": lambda: self._kill(1),
            "a third one comes": self._replace,
            f"one is cut off for {PARTITION_S} s": self._cut_off,
            "after that": lambda: None,
        }
        with self.operator.at_work():
            for name, hurt in steps.items():
                if hurt == self._cut_off and self.fleet.workers[2].machine is None:
                    continue
                yield self._phase(name, hurt, console)
        tally = Tally("every adapter once more")
        self.begun[tally.name] = time.monotonic()
        self.judge.ask_each(tally, self.num_clients)
        yield tally

    def note_workers(self) -> None:
        """Ask the workers that are alive for their numbers."""
        for worker in self.fleet.workers:
            if worker.process.poll() is None and worker.name not in self.names.values():
                self.names[worker.number] = worker.name

    def _phase(self, name: str, hurt: Callable[[], None], console: Console) -> Tally:
        tally = Tally(name)
        self.begun[name] = time.monotonic()
        with console.status(name), ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._load, tally)
            hurt()
            running.result()
        self.note_workers()
        return tally

    def _load(self, tally: Tally) -> None:
        self.judge.run(tally, self.num_requests, self.num_clients)

    def _kill(self, index: int) -> None:
        with self.operator.without(self.fleet.workers[index]):
            self.fleet.workers[index].kill()

    def _replace(self) -> None:
        self.fleet.start_worker(self.parameters)
        self.fleet.wait_ready(1)

    def _cut_off(self) -> None:
        worker = self.fleet.workers[2]
        assert worker.machine is not None
        with self.operator.without(worker, is_cut_off=True):
            worker.machine.cut()
            time.sleep(PARTITION_S)
            worker.machine.join()
            time.sleep(SETTLE_S)
        self.versions.settle()


def main(
    num_workers: Annotated[int, typer.Option(min=3, help="Workers beside the fronts.")] = 3,
    num_adapters: Annotated[int, typer.Option(min=2, help="Adapters; the n-th is asked for 1/n as often.")] = 100,
    num_requests: Annotated[int, typer.Option(min=1, help="Of each of the seven phases.")] = 300,
    num_clients: Annotated[int, typer.Option(min=1, help="That ask at the same time.")] = 8,
    namespaces: Annotated[bool, typer.Option(help="Give each process a network namespace, cut one off.")] = True,
    compare: Annotated[bool, typer.Option(help="Then load fresh fleets with and without routing, and compare.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for the picture, load_fleet.png.")] = Path("bench_results"),
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 1,
    update_docs: Annotated[
        bool, typer.Option("--docs", help="Write the tables and the picture of docs/fleet.md.")
    ] = False,
) -> None:
    """Start a fleet and both fronts, load it, hurt it; exit status 1 after a wrong answer."""
    source = measured_source() if update_docs else ""
    console = Console()
    if namespaces and not can_make_machines():
        console.print("This user may not make network namespaces: run as root, or with --no-namespaces.")
        raise typer.Exit(2)
    with sigterm_as_ctrl_c():
        with started_trial(num_workers, num_adapters, num_requests, num_clients, namespaces, seed) as trial:
            tallies = list(trial.phases(console))
            phases, operated = phase_rows(tallies), told(trial.operator.done)
            console.print(render(PHASE_COLUMNS, phases))
            console.print(operated)
            for folder in (output, IMAGES) if update_docs else (output,):
                draw(tallies, trial.begun, trial.names, folder / "load_fleet.png")
        if update_docs:
            write_table(PAGE, "fleet phases", markdown_table(PHASE_COLUMNS, phases), f"{source} {operated}")
        if compare:
            routings = comparison(num_workers, num_adapters, num_clients, seed)
            console.print(render(ROUTING_COLUMNS, routings))
            if update_docs:
                write_table(PAGE, "fleet routing", markdown_table(ROUTING_COLUMNS, routings), source)
    faults = [one for tally in tallies for one in tally.asked if one.outcome in FAULTS]
    for fault in faults[:10]:
        console.print(f"{fault.outcome} through {fault.door}: {fault.detail}", style="red")
    if faults:
        raise typer.Exit(1)


@contextmanager
def started_trial(
    num_workers: int, num_adapters: int, num_requests: int, num_clients: int, namespaces: bool, seed: int
) -> Iterator[Trial]:
    """A fleet that is ready, with both fronts."""
    with ExitStack() as resources:
        by_name = [number for number in range(num_adapters) if not is_loaded_by_hand(number)]
        model, adapters, parameters = resources.enter_context(_adapters(by_name, "64MiB"))
        machines = resources.enter_context(Machines(num_workers + 2)) if namespaces else None
        options = ("--router-mode", "kv", "--migration-limit", "3")
        fleet = resources.enter_context(DynamoFleet(model, BASE, options, machines=machines))
        start_workers(fleet, num_workers, by_name, parameters)
        client = resources.enter_context(Client(f"grpc://{fleet.start_triton_front(parameters)}"))
        versions = Versions()
        for number in range(num_adapters):
            versions.must(number, 0)
        operator = FleetOperator(fleet, client, versions, adapters, num_adapters, seed)
        operator.load_first()
        fleet.wait_until(lambda: {adapter_name(number) for number in range(num_adapters)} <= set(fleet.models()))
        judge = Judge([OpenAIDoor(fleet.url), TritonDoor(client)], versions, num_adapters, seed)
        trial = Trial(fleet, parameters, judge, versions, operator, num_requests, num_clients)
        trial.note_workers()
        yield trial


@contextmanager
def _adapters(numbers: Sequence[int], memory: str) -> Iterator[tuple[Path, Path, Mapping[str, str]]]:
    """The model, the folder of the adapters, and the workers' parameters. memory: of their adapters."""
    with TemporaryDirectory() as directory:
        model, adapters = save_checkpoint(Path(directory) / "model"), Path(directory) / "adapters"
        # Dynamo's front takes no model without a template for chats and an end token, even if no request uses them.
        (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": PROMPT_TOKENS[-1]}))
        for number in numbers:
            save_adapter(adapters / adapter_name(number), number, version=0)
        sources = json.dumps([{"source": "directory", "root": str(adapters)}])
        yield model, adapters, {**PARAMETERS, "lora_cache_host_memory_bytes": memory, "lora_sources": sources}


def start_workers(fleet: DynamoFleet, num_workers: int, numbers: Sequence[int], parameters: Mapping[str, str]) -> None:
    """Start workers, and wait until Dynamo's front knows these adapters."""
    names = set(map(adapter_name, numbers))
    for _ in range(num_workers):
        fleet.start_worker(parameters)
    fleet.wait_ready(num_workers)
    fleet.wait_until(lambda: names <= set(fleet.models()))


ROUTINGS: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "by prefix and adapter": (("--router-mode", "kv"), {}),
    "by prefix": (("--router-mode", "kv"), {"DYN_LORA_ENABLED": "false"}),
    "at random": (("--router-mode", "random"), {"DYN_LORA_ENABLED": "false"}),
}
"""The options and variables of Dynamo's front for each way of routing."""


def comparison(
    num_workers: int, num_adapters: int, num_clients: int, seed: int, num_requests: int = 1000
) -> list[list[str]]:
    """Put the same load on fresh fleets whose fronts route differently: a row of ROUTING_COLUMNS for each."""
    rows = []
    for name, (options, environ) in ROUTINGS.items():
        numbers = range(num_adapters)
        with _adapters(numbers, "8MiB") as (model, _, parameters), ExitStack() as resources:
            fleet = resources.enter_context(DynamoFleet(model, BASE, options, front_environ=environ))
            start_workers(fleet, num_workers, numbers, parameters)
            versions = Versions()
            for number in numbers:
                versions.must(number, 0)
            judge, tally = Judge([OpenAIDoor(fleet.url)], versions, num_adapters, seed), Tally(name)
            judge.run(tally, num_requests, num_clients)
            hits, misses = (
                sum(worker.metric(f"multilora_lora_tier_{outcome}_total", 'tier="host"') for worker in fleet.workers)
                for outcome in ("hits", "misses")
            )
            rows.append([name, f"{tally.hit_rate:.0%}", f"{hits / max(1, hits + misses):.0%}", *_times(tally)])
    return rows


def phase_rows(tallies: Sequence[Tally]) -> list[list[str]]:
    """The answers that the clients got, a row for each phase. PHASE_COLUMNS has every Outcome in its order."""
    kinds = get_args(Outcome)
    return [
        [tally.name, *(str(tally.outcomes[kind]) for kind in kinds), *_times(tally), f"{tally.hit_rate:.0%}"]
        for tally in tallies
    ]


def told(operations: Mapping[str, int]) -> str:
    """A sentence of what the operator did, and how often."""
    return f"Meanwhile: {', '.join(f'{number} x {operation}' for operation, number in sorted(operations.items()))}."


def render(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The same for the console."""
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*row)
    return table


def _times(tally: Tally) -> list[str]:
    milliseconds = [one.seconds * 1e3 for one in tally.asked]
    return [f"{median(milliseconds):.0f}", f"{quantiles(milliseconds, n=20)[-1]:.0f}"]
