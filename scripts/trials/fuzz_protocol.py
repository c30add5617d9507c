"""Sends a real server wrong requests of every kind: each gets an answer or a typed error, in time.

The command starts the server, with a model of a few thousand random parameters behind the default model's tokenizer, so
that the protocol causes nearly all the work. The server passes if it answers every request within its time limit, and a
valid request without an error; if its answers at the end equal those at the start; and if in the second half none of
its processes, nor its part of /dev/shm, grows any more: both keep room for the largest request so far.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from tritonclient.grpc import InferenceServerClient, InferInput

from marked_tables import console_table, markdown_table, write_table
from multilora_client import Client
from multilora_engine.models.registry import read_model_config
from multilora_engine.tritonserver import ServerProcess
from multilora_engine.tritonserver.installation import SHARED_MEMORY
from multilora_wire.layout import num_values
from plots import DOCS
from servers.tiny_server import tiny_server
from sources import measured_source
from trials.fuzz_doors import ANSWERED, Doors, Outcome
from trials.fuzz_requests import NOTHING, Case, make_case
from trials.soak_memory import anonymous_bytes
from trials.wire_requests import (
    CACHED_TASK_ID,
    DOORS,
    InputSpec,
    ModelFacts,
    WireRequest,
    WireTensor,
    random_adapter,
    tensor,
)

MODULES = (1, 4)
"""attn_q and attn_dense: one adapter row of each kind of shape is enough here."""

PAGE = DOCS / "operating.md"
TABLE = "fuzz"

REQUEST_TIMEOUT_S = 20.0
"""The timeout that requests tell the server, where the door passes it on; the client waits `ANSWER_TIMEOUT_S`."""

ANSWER_TIMEOUT_S = 60.0
MAX_GROWTH_BYTES = 48 << 20
_MAX_SHOWN = 20
_NUM_PARTS = 4
"""The parts between which the server's memory is measured."""


@dataclass
class Tally:
    """The outcomes, by kind of mutation. failures: the number of a case and its fault."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    slowest_s: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def totals(self) -> Counter[str]:
        return sum(self.counts.values(), Counter[str]())

    def add(self, case: Case, outcome: Outcome, seconds: float) -> None:
        with self._lock:
            self.counts.setdefault(case.kind, Counter())[outcome.word] += 1
            self.slowest_s[case.kind] = max(self.slowest_s[case.kind], seconds)  # type: ignore[assignment]
            if not is_right(case, outcome):
                where = f"{case.kind} at {case.request.door}"
                self.failures.append((case.number, f"{where}: {outcome.word} {outcome.detail[:300]}"))


@dataclass(frozen=True)
class Sizes:
    """Bytes in memory of each process of a server, by pid and name, and of the server's files in /dev/shm."""

    processes: dict[tuple[int, str], int]
    shared: int

    def by_name(self) -> dict[str, int]:
        return {f"{name} ({pid})": size for (pid, name), size in self.processes.items()} | {"/dev/shm": self.shared}


def is_right(case: Case, outcome: Outcome) -> bool:
    """A valid request must be answered, unless the server is busy; any other one must be answered or refused."""
    if case.kind == NOTHING:
        return outcome.word in (ANSWERED, "UNAVAILABLE")
    return outcome.is_right


def read_facts(grpc_url: str, model: Path) -> ModelFacts:
    """The facts about the models of a running server from which requests are made."""
    with InferenceServerClient(grpc_url) as client:
        configs = {name: client.get_model_config(name, as_json=True)["config"] for name in set(DOORS.values())}
    config = read_model_config(model)
    sites = config.sites
    return ModelFacts(
        inputs={name: {entry["name"]: _spec(entry) for entry in c["input"]} for name, c in configs.items()},
        row_widths={module: num_values(sites.module_at[0, module], rank=1) for module in MODULES},
        num_layers=sites.num_layers,
        vocab_size=config.vocab_size,
        has_encoder=sites.has_encoder,
    )


def _spec(entry: dict[str, object]) -> InputSpec:
    datatype = str(entry["data_type"]).removeprefix("TYPE_")
    dims = entry["dims"]
    assert isinstance(dims, list)
    return InputSpec("BYTES" if datatype == "STRING" else datatype, tuple(map(int, dims)))


class Fuzz:
    """Clients of one running server."""

    def __init__(self, grpc_url: str, http_url: str, facts: ModelFacts, seed: int, num_clients: int) -> None:
        self._urls = (grpc_url, http_url)
        self._facts = facts
        self._seed = seed
        self._num_clients = num_clients

    def case(self, number: int) -> Case:
        return make_case(self._seed, number, self._facts, REQUEST_TIMEOUT_S)

    def run(self, numbers: Sequence[int], tally: Tally, on_done: Callable[[], None] = lambda: None) -> None:
        """Send the cases of these numbers, several at once."""
        waiting = queue.SimpleQueue[int]()
        for number in numbers:
            waiting.put(number)

        def act(_: int) -> None:
            with self._doors() as doors, suppress(queue.Empty):
                while True:
                    case, started = self.case(waiting.get_nowait()), time.perf_counter()
                    outcome = doors.ask(case.request)
                    tally.add(case, outcome, time.perf_counter() - started)
                    on_done()

        with ThreadPoolExecutor(self._num_clients) as pool:
            list(pool.map(act, range(self._num_clients)))

    @contextmanager
    def cached_adapter(self) -> Iterator[None]:
        """Keep CACHED_TASK_ID in the server until the context ends, during all other requests."""
        self._must_answer("cached", random_adapter(Random(0), CACHED_TASK_ID, self._facts))
        with Client(f"grpc://{self._urls[0]}") as client:
            client.pin_adapter(CACHED_TASK_ID)
            yield
            client.unload_adapter(CACHED_TASK_ID)

    def canaries(self) -> list[str]:
        """Answers that must never change: of the base model, and of the cached adapter."""
        adapter = tensor("lora_task_id", [CACHED_TASK_ID], "UINT64")
        return [self._canary([]), self._canary([adapter])]

    def _canary(self, extra: list[WireTensor]) -> str:
        prompt = [tensor("input_ids", [5, 6, 7, 8], "INT32"), tensor("max_tokens", [16], "INT32")]
        with InferenceServerClient(self._urls[0]) as client:
            inputs = []
            for part in (*prompt, *extra):
                inputs.append(InferInput(part.name, part.shape, part.datatype))
                inputs[-1]._raw_content = part.data
            return str(client.infer("generation_unary", inputs).as_numpy("output_ids").tolist())

    def _must_answer(self, request_id: str, tensors: list[WireTensor]) -> None:
        with self._doors() as doors:
            outcome = doors.ask(WireRequest("gRPC", "generation_unary", request_id, tensors))
        assert outcome.word == ANSWERED, outcome

    @contextmanager
    def _doors(self) -> Iterator[Doors]:
        doors = Doors(*self._urls, ANSWER_TIMEOUT_S)
        try:
            yield doors
        finally:
            doors.close()


def measure(server: ServerProcess) -> Sizes:
    processes = {}
    root = psutil.Process(server.pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            processes[process.pid, _name(process)] = anonymous_bytes(process)
    shared = sum(path.stat().st_blocks * 512 for path in SHARED_MEMORY.glob(f"*{server.token}*"))
    return Sizes(processes, shared)


def _name(process: psutil.Process) -> str:
    """The name of a process; a stub has its model's name."""
    words = process.cmdline()
    models = [Path(word).parents[1].name for word in words if word.endswith("/model.py")]
    return models[0] if models else (words[2] if words[1:2] == ["-m"] else process.name())


def render(tally: Tally) -> Table:
    words = _words(tally)
    rows = [
        (kind, str(counts.total()), *(str(counts[word] or "") for word in words), f"{tally.slowest_s[kind]:.1f}")
        for kind, counts in sorted(tally.counts.items())
    ]
    totals = tally.totals
    rows.append(("all", str(totals.total()), *(str(totals[word]) for word in words), ""))
    return console_table(("what was done", "requests", *words, "slowest s"), rows)


def _words(tally: Tally) -> list[str]:
    return sorted(tally.totals, key=lambda word: (word.isupper(), word))


def render_sizes(stages: Sequence[Sizes]) -> Table:
    columns = [sizes.by_name() for sizes in stages]
    heading = ("MiB", "at the start", *(f"after {i}/{len(stages) - 1}" for i in range(1, len(stages))))
    rows = [(name, *(f"{sizes.get(name, 0) / 2**20:.1f}" for sizes in columns)) for name in columns[-1]]
    return console_table(heading, rows)


def second_half_growth(stages: Sequence[Sizes]) -> int:
    """The largest growth in bytes of a process or of /dev/shm; a new process counts whole."""
    middle, end = stages[len(stages) // 2].by_name(), stages[-1].by_name()
    return max(size - middle.get(name, 0) for name, size in end.items())


def outcome_table(tally: Tally, stages: Sequence[Sizes], is_unchanged: bool) -> str:
    """The outcomes as a document has them; of processes only those that the server began with."""
    totals = tally.totals
    first, last = (stages[place].processes.keys() for place in (0, -1))
    return markdown_table(
        ("", "count"),
        [
            ("requests", f"{totals.total():,}"),
            ("ways of being wrong", f"{len(tally.counts.keys() - {NOTHING})}"),
            ("doors", f"{len(DOORS)}"),
            *((word, f"{totals[word]:,}") for word in _words(tally)),
            ("neither an answer nor a typed error, or too late", f"{len(tally.failures)}"),
            ("processes that died", f"{len(first - last)}"),
            ("valid requests with another answer afterwards", "0" if is_unchanged else "some"),
            ("most growth over the second half", f"{second_half_growth(stages) / 2**20:.1f} MiB"),
            ("slowest request", f"{max(tally.slowest_s.values()):.1f} s"),
        ],
    )


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 20_000,
    clients: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the requests; their interleaving is up to the machine.")] = 0,
    only: Annotated[list[int], typer.Option(help="Send the request of this number alone; repeat for several.")] = [],  # noqa: B006
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/operating.md.")] = False,
) -> None:
    """Send wrong requests and check that each is answered, or refused with a reason. Ends with status 1 if not.

    A failing request is told by its number: `--seed S --only N` sends it again, and says how it was answered.
    """
    source = measured_source() if update_docs else ""
    console, tally, started = Console(), Tally(), time.perf_counter()
    numbers = only or list(range(requests))
    parts = [numbers[len(numbers) * i // _NUM_PARTS : len(numbers) * (i + 1) // _NUM_PARTS] for i in range(_NUM_PARTS)]
    with Progress(console=console, transient=True) as progress, tiny_server() as (server, model):
        task = progress.add_task("asking", total=len(numbers))
        fuzz = Fuzz(server.grpc_url, server.http_url, read_facts(server.grpc_url, model), seed, clients)
        with fuzz.cached_adapter():
            canaries = fuzz.canaries()
            stages = [measure(server)]
            for part in parts:
                fuzz.run(part, tally, lambda: progress.advance(task))
                stages.append(measure(server))
            is_unchanged = fuzz.canaries() == canaries
    console.print(render(tally))
    console.print(render_sizes(stages))
    for number in only:
        console.print(escape(f"{fuzz.case(number)}"))
    for number, failure in tally.failures[:_MAX_SHOWN]:
        console.print(f"[red]--seed {seed} --only {number}: {escape(failure)}")
    if update_docs:
        write_table(PAGE, TABLE, outcome_table(tally, stages, is_unchanged), source)
    is_flat = bool(only) or second_half_growth(stages) <= MAX_GROWTH_BYTES
    is_alive = stages[0].processes.keys() == stages[-1].processes.keys()
    verdicts = (
        f"{len(tally.failures)} failures",
        f"the canaries {'are the same' if is_unchanged else 'CHANGED'}",
        f"memory is {'flat' if is_flat else 'NOT FLAT'}",
        f"{'every process lives' if is_alive else 'a process DIED'}",
        f"{time.perf_counter() - started:.0f} s",
    )
    console.print("; ".join(verdicts))
    raise typer.Exit(0 if is_unchanged and is_flat and is_alive and not tally.failures else 1)
