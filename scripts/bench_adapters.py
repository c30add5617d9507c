"""What adapters cost: memory against parameters, the way in, the way to a step, throughput, and other requests' pauses.

memory       bytes an adapter takes in its tiers over parameters x their size; default model, all linear layers
way in       packing and inserting one, in GB/s, beside a plain copy of the same bytes
first token  of a request alone: its adapter was just used, has lost its place in the device tier, or comes along
throughput   answers of adapters drawn from 5 .. 2000 by Zipf's law, all cached. A request draws its rank first, so
             that every setting has the same ranks in its batches; the popular adapters alone would not
thrash       twice the adapters the device tier holds, against as many as it holds
pauses       time between the tokens of a running batch while each step's end brings an upload that evicts another

All but memory and way in use an engine in this process on a CPU, where host and device tier are the same pages and the
device tier holds `max_loras` places, with a model of random weights. What is compared runs in turn, round after round,
so that what else the machine does hits all of it; medians are reported.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from bench_rows import Row, render, write_results
from prepare_default_model import ensure_default_checkpoint
from rich.console import Console
from rich.progress import Progress
from telling_adapters import save_plain_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from multilora_engine.config import EngineConfig, LoRAConfig
from multilora_engine.engine import Engine
from multilora_engine.lora.format import AdapterLayout, PackedAdapter, adapter_layout, lora_modules, pack_adapter
from multilora_engine.lora.host_tier import HostTier
from multilora_engine.models.model_config import read_model_config
from multilora_engine.request import GenerationRequest, SamplingParams

RANKS = (8, 16, 32, 64)
POPULATIONS = (5, 100, 1000, 2000)
MODULES = (1, 2, 3, 4, 5, 6, 7)
PLACES = 16
"""`max_loras` of the engines that measure the device tier; as many clients keep it busy."""

_VOCABULARY = 4096
_MAX_LEN = 512
_WARM_UP_TOKENS = 4


@dataclass
class Timing:
    """Of one request: when it was accepted, and when each of its tokens came; seconds."""

    accepted: float
    tokens: list[float]

    @property
    def first_token_s(self) -> float:
        return self.tokens[0] - self.accepted

    @property
    def pauses_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.tokens)]


def random_wire(layout: AdapterLayout, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`lora_weights`, float32, and `lora_config` of an adapter on all linear layers; small random numbers."""
    modules = lora_modules(layout)
    config = torch.tensor([[m, layer, rank, 0] for layer in range(layout.num_layers) for m in MODULES])
    sizes = torch.tensor([modules[m].num_values(rank, False) for m in MODULES]).repeat(layout.num_layers)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(len(config), int(sizes.max()), generator=generator) * 0.01
    weights[torch.arange(weights.shape[1]) >= sizes[:, None]] = 0
    return weights, config.int()


def num_parameters(layout: AdapterLayout, rank: int) -> int:
    """Of an adapter on all linear layers."""
    modules = lora_modules(layout)
    return layout.num_layers * sum(modules[m].num_values(rank, False) for m in MODULES)


def memory_rows(model: Path) -> list[Row]:
    """Bytes in a tier over bytes of parameters."""
    rows = []
    for dtype, rank in itertools.product(("float32", "bfloat16"), (8, 16, 64)):
        layout = adapter_layout(read_model_config(model), 64, dtype)
        packed = pack_adapter(*random_wire(layout, rank, 0), layout)
        value = packed.pages.nbytes / (num_parameters(layout, rank) * layout.torch_dtype.itemsize)
        goal = "<= 1.05" if rank == 16 else ""
        rows.append(Row(f"memory: {dtype}, rank {rank}", value, "x parameters", goal, value <= 1.05 if goal else None))
    return rows


def way_in_rows(model: Path, rounds: int) -> list[Row]:
    """GB/s of packed bytes for pack, insert and a plain copy; more bytes than the caches hold, in turn."""
    layout = adapter_layout(read_model_config(model), 64, "float32")
    wires = [random_wire(layout, 16, seed) for seed in range(4)]
    packed = [pack_adapter(*wire, layout) for wire in wires]
    target = torch.empty_like(packed[0].pages)
    tier = HostTier(len(packed) * len(target), layout.page_bytes)
    tier.pool.storage.zero_()  # or the operating system would first have to find the memory
    seconds: dict[str, list[float]] = {"plain copy": [], "pack": [], "insert": []}
    for i in range(rounds):
        chosen = i % len(wires)
        seconds["plain copy"].append(timed(lambda: target.copy_(packed[chosen].pages)))  # noqa: B023 - called here
        seconds["pack"].append(timed(lambda: pack_adapter(*wires[chosen], layout)))  # noqa: B023
        seconds["insert"].append(timed(lambda: tier.insert(i, packed[chosen])))  # noqa: B023
        tier.remove(next(iter(tier.adapters)))
    return [Row(f"way in: {k}", target.nbytes / statistics.median(v) / 1e9, "GB/s") for k, v in seconds.items()]


def timed(task: Callable[[], object]) -> float:
    """Seconds it takes."""
    started = time.perf_counter()
    task()
    return time.perf_counter() - started


class Bench:
    """A model of one wide layer with random weights, and adapters for it that share their numbers but not identity.

    One layer, so that 2000 adapters fit in memory; wide, so that an adapter is a small part of it, as in real models.
    """

    def __init__(self, directory: Path, num_threads: int) -> None:
        self._model = _save_random_model(directory)
        self._num_threads = num_threads
        self.layout = adapter_layout(read_model_config(directory), max(RANKS), "bfloat16")
        self._packed = {rank: pack_adapter(*random_wire(self.layout, rank, rank), self.layout) for rank in RANKS}
        self._request_ids = itertools.count()
        self._random = Random(0)

    @contextmanager
    def engine(self, max_loras: int, num_adapters: int) -> Iterator[Engine]:
        """An engine whose tiers hold exactly the adapters 0 .. num_adapters - 1, which are in it."""
        num_bytes = sum(self.adapter(task).pages.nbytes for task in range(num_adapters))
        lora = LoRAConfig(
            max_loras=max_loras,
            max_lora_rank=max(RANKS),
            lora_dtype="bfloat16",
            lora_cache_host_memory_bytes=num_bytes,
            lora_on_conflict="replace",
        )
        config = EngineConfig(
            model_path=self._model,
            device="cpu",
            num_threads=self._num_threads,
            max_num_seqs=32,
            kv_cache_memory_bytes=256 << 20,
            lora=lora,
        )
        engine = Engine(config)
        for task in range(num_adapters):
            engine.put_adapter(task, self.adapter(task))
        self.serve(engine, [self.request(task % num_adapters, 8, 2) for task in range(32)], 32)
        yield engine
        engine.close()

    def adapter(self, task: int) -> PackedAdapter:
        """The adapter of a task id: its rank is RANKS[task % 4]."""
        return replace(self._packed[RANKS[task % len(RANKS)]], digest=f"{task:032x}")

    def request(self, task: int, prompt_tokens: int, max_tokens: int) -> GenerationRequest:
        prompt = [self._random.randrange(_VOCABULARY) for _ in range(prompt_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens, end_id=-1)
        return GenerationRequest(f"bench-{next(self._request_ids)}", prompt, sampling, task)

    def draw(self, population: int) -> int:
        """A task id below `population`: any rank as likely as another, then by Zipf's law among those of that rank."""
        tasks = range(self._random.randrange(len(RANKS)), population, len(RANKS))
        return self._random.choices(tasks, [1 / (place + 1) for place in range(len(tasks))])[0]

    def serve(
        self,
        engine: Engine,
        requests: Iterable[GenerationRequest],
        num_clients: int,
        after_step: Callable[[], None] = lambda: None,
    ) -> list[Timing]:
        """Have all requests answered, `num_clients` of them at any time."""
        waiting = iter(requests)
        timings: dict[str, Timing] = {}

        def submit(request: GenerationRequest) -> None:
            timings[request.request_id] = Timing(time.perf_counter(), [])
            engine.add_request(request)

        for request in itertools.islice(waiting, num_clients):
            submit(request)
        while engine.has_work:
            outputs = engine.step()
            after_step()
            for output in outputs:
                timings[output.request_id].tokens += [time.perf_counter()] * len(output.token_ids)
                if output.is_final and (following := next(waiting, None)) is not None:
                    submit(following)
        return list(timings.values())


def first_token_rows(bench: Bench, rounds: int) -> list[Row]:
    """Requests one at a time, in turn: the last adapter again, the one whose place was lost longest ago, a new one."""
    seconds: dict[str, list[float]] = {"in its place": [], "place lost": [], "comes along": []}
    with bench.engine(max_loras=PLACES, num_adapters=4 * PLACES) as engine:

        def ask(kind: str, task: int, comes_along: bool = False) -> None:
            request = bench.request(task, 16, 1)
            started = time.perf_counter()
            if comes_along:
                engine.put_adapter(task, replace(bench.adapter(task), digest=f"{next(versions):032x}"))
            bench.serve(engine, [request], 1)
            seconds[kind].append(time.perf_counter() - started)

        versions = itertools.count(1 << 64)
        for i in range(32 * rounds):
            task = i % (4 * PLACES)
            ask("place lost", task)
            ask("in its place", task)
            ask("comes along", task, comes_along=True)
    return [
        Row(f"first token: {kind}, {name}", value * 1e3, "ms")
        for kind, values in seconds.items()
        for name, value in (("median", statistics.median(values)), ("p99", p99(values)))
    ]


def throughput_rows(bench: Bench, rounds: int, num_requests: int) -> list[Row]:
    """Tokens per second of each population, in turn; answers of 16 tokens to prompts of 16."""
    rates: dict[int, list[float]] = {population: [] for population in POPULATIONS}
    with bench.engine(max_loras=32, num_adapters=max(POPULATIONS)) as engine:
        for population in itertools.chain.from_iterable(itertools.repeat(POPULATIONS, rounds)):
            requests = [bench.request(bench.draw(population), 16, 16) for _ in range(num_requests)]
            seconds = timed(lambda: bench.serve(engine, requests, 32))  # noqa: B023 - called here
            rates[population].append(num_requests * 16 / seconds)
    rows = [Row(f"throughput: {n} adapters", statistics.median(rates[n]), "tokens/s") for n in POPULATIONS]
    ratio = statistics.median(most / least for least, most in zip(rates[5], rates[2000], strict=True))
    return [*rows, Row("throughput: 2000 against 5", ratio, "x", ">= 0.95", ratio >= 0.95)]


def thrash_rows(bench: Bench, rounds: int) -> list[Row]:
    """Median time to the first token, adapters drawn evenly from those that fit and from twice as many, in turn."""
    medians: dict[int, list[float]] = {PLACES: [], 2 * PLACES: []}
    random = Random(1)
    with bench.engine(max_loras=PLACES, num_adapters=2 * PLACES) as engine:
        for num_adapters in itertools.chain.from_iterable(itertools.repeat(medians, rounds)):
            requests = [bench.request(random.randrange(num_adapters), 16, 16) for _ in range(8 * PLACES)]
            timings = bench.serve(engine, requests, PLACES)
            medians[num_adapters].append(statistics.median(timing.first_token_s for timing in timings))
    ratio = statistics.median(twice / fit for fit, twice in zip(*medians.values(), strict=True))
    return [
        Row("thrash: first token, adapters fit", statistics.median(medians[PLACES]) * 1e3, "ms"),
        Row("thrash: first token, twice as many", statistics.median(medians[2 * PLACES]) * 1e3, "ms"),
        Row("thrash: twice as many against fit", ratio, "x", "<= 3", ratio <= 3),
    ]


def pause_rows(bench: Bench, rounds: int) -> list[Row]:
    """p99 of the time between tokens, quiet and with uploads, in turn."""
    pauses: dict[str, list[float]] = {"quiet": [], "with uploads": []}
    with bench.engine(max_loras=PLACES, num_adapters=4 * PLACES) as engine:
        new_tasks = itertools.count(4 * PLACES)

        def upload() -> None:
            task = next(new_tasks)
            engine.put_adapter(task, bench.adapter(task))

        for kind in itertools.chain.from_iterable(itertools.repeat(pauses, rounds)):
            for task in range(PLACES):
                engine.put_adapter(task, bench.adapter(task))
            requests = [bench.request(task, 16, 64) for task in range(PLACES)]
            after_step = upload if kind == "with uploads" else lambda: None
            for timing in bench.serve(engine, requests, PLACES, after_step):
                pauses[kind] += timing.pauses_s[_WARM_UP_TOKENS:]
    ratio = p99(pauses["with uploads"]) / p99(pauses["quiet"])
    return [
        *(Row(f"pauses: {kind}, median", statistics.median(values) * 1e3, "ms") for kind, values in pauses.items()),
        *(Row(f"pauses: {kind}, p99", p99(values) * 1e3, "ms") for kind, values in pauses.items()),
        Row("pauses: p99 with uploads against quiet", ratio, "x", "<= 1.5", ratio <= 1.5),
    ]


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def _save_random_model(path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=_MAX_LEN,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    save_plain_tokenizer(path, _VOCABULARY)
    return path


def main(
    output: Annotated[Path, typer.Option(help="Folder for adapters.csv and adapters.png.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(help="Repetitions of everything that is compared.")] = 5,
    requests: Annotated[int, typer.Option(help="Requests of one throughput measurement.")] = 128,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 is one per core.")] = 0,
    model: Annotated[Path | None, typer.Option(help="Checkpoint whose adapters are packed; default: ours.")] = None,
) -> None:
    """Measure what adapters cost, print a table with the goals, and plot it."""
    console = Console()
    checkpoint = model or ensure_default_checkpoint()
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="multilora-bench-") as directory, Progress(console=console) as progress:
        bench = Bench(Path(directory), threads)
        parts: list[Callable[[], list[Row]]] = [
            lambda: memory_rows(checkpoint),
            lambda: way_in_rows(checkpoint, 4 * rounds),
            lambda: first_token_rows(bench, rounds),
            lambda: throughput_rows(bench, rounds, requests),
            lambda: thrash_rows(bench, rounds),
            lambda: pause_rows(bench, rounds),
        ]
        rows = [row for part in progress.track(parts, description="measuring") for row in part()]
    console.print(render(rows, "adapters"))
    write_results(rows, output, "adapters")
    console.print(f"{output}/adapters.csv and adapters.png written; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    typer.run(main)
