"""Measures adapters: memory against parameters, the way in, the way to a step, throughput, other requests' pauses.

memory       bytes an adapter takes in its tiers over parameters x their size; default model, all linear layers
way in       packing and inserting one, in GB/s, beside a plain copy of the same bytes
first token  of a request alone: its adapter was just used, has lost its place in the device tier, is on disk, or comes
             along (and is written to disk after the answer)
throughput   answers of adapters drawn from 5 .. 2000 by Zipf's law, all in memory. A request draws its rank first, so
             that every setting has the same ranks in its batches; the popular adapters alone would not.
             "mixed": 32 clients draw freely. Of 2000 adapters a step then uses many more than of 5, and has to read
             them, which is work that no server can save: the bytes of the adapters in a step are shown. "alike": 4
             clients, each with a rank of its own, so that every step uses 4 adapters and the same bytes, of however
             many there are; what differs then is what their number itself costs
pauses       time between the tokens of a running batch while others' adapters come in: each step's end brings an upload
             that evicts another; or one after the other is fetched from a directory and packed; or is read from disk
activated    a conversation that the base has answered, and eight adapters of rank 16 that are asked about it, one after
             another: the first token, and the time of all eight. Activated adapters use keys and values of the base,
             plain ones compute the conversation again, as PEFT does; default model

kinds        answers of 32 tokens to sixteen requests with sixteen adapters of one kind: plain ones of rank 16 on all
             linears, the same with 16 rows of tokens, the embeddings, or the head; of rank 32; sets of two plain ones;
             none. Making a set, on one thread, against copying pages of its size; default model

All but memory and way in use an engine in this process on a CPU, where host and device tier are the same pages and the
device tier has `max_loras` places; all but activated and kinds, with a model of random weights. What is compared runs
in turn, round after round, so that other load on the machine meets all contestants; medians are reported.

A part is a function of a `Setting` that returns rows, an entry of `PARTS`, and a line above.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from pydantic import ByteSize
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save

from benchmarks.adapter_bench import PLACES, RANKS, WARM_UP_TOKENS, Bench, random_wire, settle
from benchmarks.machine_limits import seconds_of
from benchmarks.peft_baseline import PeftBaseline
from benchmarks.results import Row, at_least, at_most, measures_table, p99, report, threads_title
from marked_tables import write_table
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.adapter_sets import Part as SetPart
from multilora_engine.lora.adapter_sets import plan_set
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.format import pack_adapter, pack_peft
from multilora_engine.lora.host_tier import HostTier
from multilora_engine.lora.layout import NO_TRAITS, AdapterTraits, PackedAdapter
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.names import SetMember, checked_members
from multilora_engine.lora.sources.source import AdapterKey
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.quickstart.default_model import ensure_default_checkpoint
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_wire.adapter_info import AdapterMember
from multilora_wire.layout import AdapterLayout, num_values
from multilora_wire.peft_files import read_peft
from multilora_wire.tensor_file import MemoryBytes
from plots import PERFORMANCE, write_plots
from sources import measured_source

POPULATIONS = (5, 100, 1000, 2000)


@dataclass(frozen=True)
class Setting:
    """What a part measures. model: the checkpoint whose adapters are packed. bench: makes engines and requests.

    rounds: repetitions of everything that is compared. num_requests: of one measurement of throughput.
    """

    model: Path
    bench: Bench
    rounds: int
    num_requests: int


def num_parameters(layout: AdapterLayout, rank: int) -> int:
    """The parameters of an adapter on all linear layers."""
    return sum(num_values(module, rank) for module in layout.sites.plain_modules)


def memory_rows(setting: Setting) -> list[Row]:
    """Bytes in a tier over bytes of parameters."""
    rows = []
    for dtype, rank in itertools.product(("float32", "bfloat16"), (8, 16, 64)):
        layout = checkpoint_layout(setting.model, 64, dtype)
        packed = pack_adapter(*random_wire(layout, rank, 0), layout)
        value = packed.pages.nbytes / (num_parameters(layout, rank) * layout.itemsize)
        rows.append(at_most(f"memory, {dtype}: rank {rank}", value, "x parameters", 1.05 if rank == 16 else None))
    return rows


def way_in_rows(setting: Setting) -> list[Row]:
    """GB/s of packed bytes for pack, insert and a plain copy; more bytes than the caches hold, in turn."""
    layout = checkpoint_layout(setting.model, 64, "float32")
    wires = [random_wire(layout, 16, seed) for seed in range(4)]
    packed = [pack_adapter(*wire, layout) for wire in wires]
    target = torch.empty_like(packed[0].pages)
    tier = HostTier(len(packed) * len(target), layout.page_bytes)
    tier.pool.storage.zero_()  # or the operating system would first have to find the memory
    loras = LoRAManager(tier, DeviceTier(layout, tier.pool, tier.pool, max_loras=1), "refuse")
    seconds: dict[str, list[float]] = {"plain copy": [], "pack": [], "insert": []}
    for i in range(4 * setting.rounds):
        chosen = i % len(wires)
        seconds["plain copy"].append(seconds_of(lambda: target.copy_(packed[chosen].pages)))  # noqa: B023 - called here
        seconds["pack"].append(seconds_of(lambda: pack_adapter(*wires[chosen], layout)))  # noqa: B023
        seconds["insert"].append(seconds_of(lambda: loras.put(i, packed[chosen])))  # noqa: B023
        loras.unload(i)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    rows = [Row(f"way in: {kind}", target.nbytes / value / 1e9, "GB/s") for kind, value in medians.items()]
    share = medians["plain copy"] / (medians["pack"] + medians["insert"])
    return [*rows, Row("way in: pack and insert, of a plain copy's speed", share, "x")]


def first_token_rows(setting: Setting) -> list[Row]:
    """Requests one at a time, in turn: one from disk, the same again, one whose place was lost, and a new version.

    Memory holds half of the adapters. Asked for one after the other, each has left it when its turn comes again; the
    adapter that was asked for `2 * PLACES` turns ago is still there, but not in its place.
    """
    bench, seconds = setting.bench, dict[str, list[float]]()
    num_adapters = 8 * PLACES
    with bench.engine(max_loras=PLACES, num_adapters=num_adapters, num_in_memory=num_adapters // 2) as engine:

        def ask(kind: str, task: int, version: int | None = None) -> None:
            request = bench.request(task, 16, 1)
            started = time.perf_counter()
            if version is not None:
                engine.put_adapter(task, bench.adapter(task, version))
            (times,) = bench.serve(engine, [request], 1)
            seconds.setdefault(kind, []).append(times[0] - started)

        for i in range(32 * setting.rounds):
            task = i % num_adapters
            ask("from disk", task)
            ask("in its place", task)
            ask("place lost", (task - 2 * PLACES) % num_adapters)
            ask("comes along", task, version=1 - i // num_adapters % 2)
    return [
        Row(f"first token, {kind}: {name}", value * 1e3, "ms")
        for kind, values in seconds.items()
        for name, value in (("median", statistics.median(values)), ("p99", p99(values)))
    ]


@dataclass(frozen=True)
class Run:
    """One measurement of throughput. bytes_per_step: the size of the adapters that a step uses, at the median."""

    tokens_per_s: float
    bytes_per_step: float


def throughput_rows(setting: Setting) -> list[Row]:
    """Tokens per second of each population, in turn; answers of 16 tokens to prompts of 16."""
    bench = setting.bench
    runs: dict[tuple[str, int], list[Run]] = {(kind, n): [] for kind in ("mixed", "alike") for n in POPULATIONS}
    with bench.engine(max_loras=32, num_adapters=max(POPULATIONS)) as engine:
        for kind, population in itertools.chain.from_iterable(itertools.repeat(runs, setting.rounds)):
            runs[kind, population].append(throughput_run(bench, engine, kind, population, setting.num_requests))
    rows = []
    for (kind, population), of_population in runs.items():
        what = f"{kind}: {population} adapters"
        rate = statistics.median(run.tokens_per_s for run in of_population)
        rows.append(Row(f"throughput, {what}", rate, "tokens/s"))
        num_bytes = statistics.median(run.bytes_per_step for run in of_population)
        rows.append(Row(f"adapters in a step, {what}", num_bytes / 1e6, "MB"))
    for kind in ("mixed", "alike"):
        pairs = zip(runs[kind, 5], runs[kind, 2000], strict=True)
        ratio = statistics.median(most.tokens_per_s / least.tokens_per_s for least, most in pairs)
        rows.append(at_least(f"throughput, {kind}: 2000 against 5", ratio, "x", 0.95))
    return rows


def throughput_run(bench: Bench, engine: Engine, kind: str, population: int, num_requests: int) -> Run:
    """kind: "mixed", 32 clients that draw freely; "alike", a client for each rank, so that all steps are alike."""
    step_bytes: list[int] = []
    if kind == "mixed":
        num_clients, tasks = 32, [bench.draw(population) for _ in range(num_requests)]
    else:
        num_clients, tasks = len(RANKS), [bench.draw_of_rank(i % len(RANKS), population) for i in range(num_requests)]
    in_flight: dict[str, int] = {}

    def requests() -> Iterator[GenerationRequest]:
        for task in tasks:
            request = bench.request(task, 16, 16)
            in_flight[request.request_id] = task
            yield request

    def after_step(ended: Sequence[str]) -> None:
        step_bytes.append(sum(bench.adapter(task).pages.nbytes for task in set(in_flight.values())))
        for request_id in ended:
            del in_flight[request_id]

    seconds = seconds_of(lambda: bench.serve(engine, requests(), num_clients, after_step))
    return Run(num_requests * 16 / seconds, statistics.median(step_bytes))


def pause_rows(setting: Setting) -> list[Row]:
    """p99 of the time between tokens, quiet and while adapters come in, in turn."""
    bench, rounds, num_adapters = setting.bench, setting.rounds, 4 * PLACES
    fetched = range(num_adapters, num_adapters + 2 * len(RANKS))
    with bench.engine(PLACES, num_adapters, source=bench.save_source(fetched)) as engine:
        new_tasks, fetches = itertools.count(fetched.stop), itertools.cycle(fetched)

        def upload(ended: Sequence[str]) -> None:
            task = next(new_tasks)
            engine.put_adapter(task, bench.adapter(task))

        def fetch(ended: Sequence[str]) -> None:
            if not engine.remote.is_busy:
                task = next(fetches)
                if engine.loras.inventory.is_known(task):
                    engine.loras.unload(task)
                engine.remote.fetch(AdapterKey(task))

        rows = compare_pauses(bench, engine, rounds, {"uploads": upload, "fetches": fetch})
    with bench.engine(PLACES, num_adapters, num_in_memory=2 * PLACES) as engine:
        others = itertools.cycle(range(PLACES, num_adapters))

        def read(ended: Sequence[str]) -> None:
            if not engine.loras.is_busy:
                engine.loras.load(next(others))

        return rows + compare_pauses(bench, engine, rounds, {"reads": read})


def compare_pauses(
    bench: Bench, engine: Engine, rounds: int, disturbances: Mapping[str, Callable[[Sequence[str]], None]]
) -> list[Row]:
    """disturbances: by name, the function that is called at the end of each step."""
    pauses: dict[str, list[float]] = {"quiet": [], **{name: [] for name in disturbances}}
    for name in itertools.chain.from_iterable(itertools.repeat(pauses, rounds)):
        for task in range(PLACES):
            engine.put_adapter(task, bench.adapter(task))
        settle(engine)
        requests = [bench.request(task, 16, 64) for task in range(PLACES)]
        for times in bench.serve(engine, requests, PLACES, disturbances.get(name, lambda ended: None)):
            pauses[name] += [later - earlier for earlier, later in itertools.pairwise(times)][WARM_UP_TOKENS:]
    rows = []
    for name, values in pauses.items():
        when = f"without {' and '.join(disturbances)}" if name == "quiet" else f"with {name}"
        rows.append(Row(f"pauses, {when}: median", statistics.median(values) * 1e3, "ms"))
        rows.append(Row(f"pauses, {when}: p99", p99(values) * 1e3, "ms"))
    quiet = p99(pauses["quiet"])
    ratios = {name: p99(pauses[name]) / quiet for name in disturbances}
    return rows + [
        at_most(f"pauses, with {name}: p99 against quiet", ratio, "x", 1.5) for name, ratio in ratios.items()
    ]


_NUM_JUDGES, _JUDGE_RANK = 8, 16
_CONVERSATIONS = {2000: 8.0, 8000: 20.0}
"""Tokens of a conversation, and how many times sooner the first token of an activated adapter shall come."""

_INVOCATION = (1, 9690)
_QUESTION_TOKENS, _ANSWER_TOKENS = 16, 8


def activated_rows(setting: Setting) -> list[Row]:
    """A conversation that the base has answered, and adapters that are asked about it, activated and plain in turn."""
    layout = checkpoint_layout(setting.model, _JUDGE_RANK, "float32")
    traits = AdapterTraits(invocation_tokens=_INVOCATION)
    lora = LoRAConfig(max_loras=2 * _NUM_JUDGES, max_lora_rank=_JUDGE_RANK)
    config = EngineConfig(
        model_path=setting.model,
        device="cpu",
        num_threads=torch.get_num_threads(),
        kv_cache_memory_bytes=ByteSize(1 << 30),
        lora=lora,
    )
    engine, rows = Engine(config), []
    tasks = {"activated": range(_NUM_JUDGES), "plain": range(_NUM_JUDGES, 2 * _NUM_JUDGES)}
    for kind, of_kind in tasks.items():
        for seed, task in enumerate(of_kind):
            wire = random_wire(layout, _JUDGE_RANK, seed)
            engine.put_adapter(task, pack_adapter(*wire, layout, traits if kind == "activated" else NO_TRAITS))
    settle(engine)
    baseline = PeftBaseline(setting.model, 1, _JUDGE_RANK)
    for length, goal in _CONVERSATIONS.items():
        prompt = _answered_conversation(engine, length)
        seconds: dict[str, list[list[float]]] = {"activated": [], "plain": [], "PEFT": []}
        for numbers in zip(*tasks.values(), strict=True):
            for kind, task in zip(tasks, numbers, strict=True):
                started = time.perf_counter()
                (times,) = setting.bench.serve(engine, [_question(prompt, task)], 1)
                seconds[kind].append([one - started for one in times])
        # PEFT computes the whole prompt for any of its adapters: the time of one tells that of eight.
        started = time.perf_counter()
        seconds["PEFT"].append([one - started for one in baseline.answer([prompt], _ANSWER_TOKENS)[1]])
        rows += _judged_rows(f"activated, {length}", seconds, goal)
    engine.close()
    return rows


def _answered_conversation(engine: Engine, length: int) -> list[int]:
    """A conversation of `length` tokens, the last ones an answer of the base, and a question about it."""
    random = Random(length)
    told = [random.randrange(100, 40_000) for _ in range(length - _ANSWER_TOKENS)]
    request = _question(told, None)
    engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            told = told + output.token_ids
    return [*told, *_INVOCATION, *(random.randrange(100, 40_000) for _ in range(_QUESTION_TOKENS))]


def _question(prompt: list[int], task: int | None) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, end_id=-1)
    return GenerationRequest(f"asked {task}", prompt, sampling, task)


def _judged_rows(name: str, seconds: Mapping[str, list[list[float]]], goal: float) -> list[Row]:
    """seconds: from each request to each of its tokens."""
    first = {kind: statistics.median(times[0] for times in of_kind) for kind, of_kind in seconds.items()}
    whole = {kind: _NUM_JUDGES * statistics.median(times[-1] for times in of_kind) for kind, of_kind in seconds.items()}
    return [
        *(Row(f"{name}: first token, {kind}", value * 1e3, "ms") for kind, value in first.items()),
        *(Row(f"{name}: all eight, {kind}", value, "s") for kind, value in whole.items()),
        at_least(f"{name}: plain against activated", first["plain"] / first["activated"], "x", goal),
    ]


_NUM_ROWS, _RANK = 16, 16
_KINDS_TOKENS = 32


def kinds_rows(setting: Setting) -> list[Row]:
    """Sixteen requests for sixteen adapters of one kind, the kinds in turn; and the making of a set."""
    config = EngineConfig(
        model_path=setting.model,
        device="cpu",
        num_threads=torch.get_num_threads(),
        kv_cache_memory_bytes=ByteSize(256 << 20),
        lora=LoRAConfig(max_loras=_NUM_ROWS, lora_cache_host_memory_bytes=ByteSize(3 << 30)),
    )
    engine = Engine(config)
    first_of = {kind: _NUM_ROWS * index for index, kind in enumerate(("plain", *_WITH, "rank 32", "set of two"), 1)}
    _put_kinds(engine, first_of)
    rates: dict[str, list[float]] = {kind: [] for kind in ("base", *first_of)}
    for kind in itertools.chain.from_iterable(itertools.repeat(rates, setting.rounds)):
        first = first_of.get(kind)
        requests = [_kinds_request(index, first and first + index) for index in range(_NUM_ROWS)]
        started = time.perf_counter()
        setting.bench.serve(engine, requests, _NUM_ROWS)
        rates[kind].append(_NUM_ROWS * _KINDS_TOKENS / (time.perf_counter() - started))
    layout = engine.loras.device.layout
    engine.close()
    medians = {kind: statistics.median(of_kind) for kind, of_kind in rates.items()}
    rows = [Row(f"kinds: {kind}", rate, "tokens/s") for kind, rate in medians.items()]
    for kind, other, goal in (
        ("token rows", "plain", 0.97),
        ("embeddings", "plain", 0.97),
        ("set of two", "rank 32", 0.97),
    ):
        pairs = zip(rates[kind], rates[other], strict=True)
        ratio = statistics.median(one / beside for one, beside in pairs)
        rows.append(at_least(f"kinds: {kind} against {other}", ratio, "x", goal))
    return [*rows, _head_row(rates, layout), *_set_rows(layout, setting.rounds)]


_WITH = ("token rows", "embeddings", "head")
"""Kinds that have a part outside the layers beside LoRA of rank 16 on all linears."""


def _put_kinds(engine: Engine, first_of: Mapping[str, int]) -> None:
    layout = engine.loras.device.layout
    for index in range(_NUM_ROWS):
        wire = random_wire(layout, _RANK, index)
        engine.put_adapter(first_of["plain"] + index, pack_adapter(*wire, layout))
        engine.put_adapter(first_of["rank 32"] + index, pack_adapter(*random_wire(layout, 2 * _RANK, index), layout))
        for kind in _WITH:
            engine.put_adapter(first_of[kind] + index, _with_part(kind, layout, index))
        settle(engine)
    for index in range(_NUM_ROWS):
        members = [SetMember(first_of["plain"] + (index + other) % _NUM_ROWS, 0.5) for other in (0, 1)]
        engine.sets.fetch(first_of["set of two"] + index, checked_members(members))
        settle(engine)


def _with_part(kind: str, layout: AdapterLayout, seed: int) -> PackedAdapter:
    """PEFT's files of an adapter on all linears and of one part more."""
    outer, generator = layout.sites.outer, torch.Generator().manual_seed(seed)
    assert outer is not None

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.02

    tensors, fields = dict[str, torch.Tensor](), dict[str, list[int]]()
    for site in layout.sites.sites:
        tensors[f"model.{site.name}.lora_A.weight"] = matrix(_RANK, site.in_size)
        tensors[f"model.{site.name}.lora_B.weight"] = matrix(site.out_size, _RANK)
    if kind == "token rows":
        fields["trainable_token_indices"] = Random(seed).sample(range(outer.vocab_size), 16)
        tensors["model.embed_tokens.token_adapter.trainable_tokens_delta"] = matrix(16, outer.head.in_size)
    else:
        name = "lm_head.lora_{}.weight" if kind == "head" else "model.embed_tokens.lora_embedding_{}"
        site = outer.head if kind == "head" else outer.embeddings
        tensors[name.format("A")], tensors[name.format("B")] = matrix(_RANK, site.in_size), matrix(site.out_size, _RANK)
    config = json.dumps({"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, **fields}).encode()
    weights = save({f"base_model.model.{name}": tensor for name, tensor in tensors.items()})
    return pack_peft(read_peft(config, MemoryBytes(weights), layout.sites), layout, Path())


def _kinds_request(index: int, task: int | None) -> GenerationRequest:
    random = Random(index)
    prompt = [random.randrange(100, 40_000) for _ in range(16)]
    return GenerationRequest(f"kinds {index}", prompt, SamplingParams(max_tokens=_KINDS_TOKENS, end_id=-1), task)


def _head_row(rates: Mapping[str, Sequence[float]], layout: AdapterLayout) -> Row:
    """The time that heads of rank 16 add to a step, over the time that their bytes take."""
    outer = layout.sites.outer
    assert outer is not None
    heads = torch.zeros(_NUM_ROWS * _RANK * (outer.head.in_size + outer.head.out_size))
    read_s = statistics.median(seconds_of(heads.sum) for _ in range(9))
    per_step = {kind: statistics.median(_NUM_ROWS / rate for rate in rates[kind]) for kind in ("plain", "head")}
    return at_most(
        "kinds: head, time over that of its bytes", (per_step["head"] - per_step["plain"]) / read_s, "x", 1.2
    )


def _set_rows(layout: AdapterLayout, rounds: int) -> list[Row]:
    """Planning and filling a set of two adapters on one thread, against copying pages of its size."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    members = [pack_adapter(*random_wire(layout, _RANK, seed), layout) for seed in range(2)]
    parts = [
        SetPart(AdapterMember(seed, 0.5, packed.digest), packed.rows, list(packed.pages))
        for seed, packed in enumerate(members)
    ]
    plan = plan_set(parts, layout)
    target = torch.zeros(len(plan.placement.fill), layout.page_bytes, dtype=torch.uint8)
    source, pages = torch.ones_like(target), list(target)
    seconds: dict[str, list[float]] = {"copy": [], "set": []}
    for _ in range(4 * rounds):
        seconds["copy"].append(seconds_of(lambda: [page.copy_(one) for page, one in zip(pages, source, strict=True)]))
        seconds["set"].append(seconds_of(lambda: plan_set(parts, layout).fill(pages)))
    torch.set_num_threads(num_threads)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return [
        Row("kinds: a set of two, made", medians["set"] * 1e3, "ms"),
        at_most("kinds: a set of two, against a copy of its bytes", medians["set"] / medians["copy"], "x", 3.0),
    ]


PARTS: Mapping[str, Callable[[Setting], list[Row]]] = {
    "memory": memory_rows,
    "way in": way_in_rows,
    "first token": first_token_rows,
    "throughput": throughput_rows,
    "pauses": pause_rows,
    "activated": activated_rows,
    "kinds": kinds_rows,
}


def write_throughput_table(rows: Sequence[Row], source: str) -> None:
    """Write the part `throughput` into docs/performance.md, and draw the page's plots anew.

    source: the sentence that tells where the figures are from.
    """
    write_table(PERFORMANCE, "adapters throughput", measures_table(rows), source)
    write_plots(PERFORMANCE)


def main(
    output: Annotated[Path, typer.Option(help="Folder for adapters.csv.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(help="Repetitions of everything that is compared.")] = 5,
    requests: Annotated[int, typer.Option(help="Requests of one throughput measurement.")] = 128,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 is one per core.")] = 0,
    model: Annotated[Path | None, typer.Option(help="Checkpoint whose adapters are packed; default: ours.")] = None,
    part: Annotated[list[str] | None, typer.Option(help="Only this part; may be repeated. Default: all.")] = None,
    update_docs: Annotated[
        bool, typer.Option("--docs", help="Write the table of docs/performance.md; needs the part throughput.")
    ] = False,
) -> None:
    """Measure the costs of adapters, and print a table with the goals."""
    if unknown := set(part or ()) - PARTS.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    if update_docs and part and "throughput" not in part:
        raise typer.BadParameter("--docs writes the table of the part throughput, which --part leaves out")
    source = measured_source() if update_docs else ""
    console = Console()
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="multilora-bench-") as directory, Progress(console=console) as progress:
        bench = Bench(Path(directory), threads)
        setting = Setting(model or ensure_default_checkpoint(), bench, rounds, requests)
        results = {name: PARTS[name](setting) for name in progress.track(part or list(PARTS), description="measuring")}
    rows = [*itertools.chain.from_iterable(results.values())]
    report(rows, f"adapters, {threads_title()}", output, "adapters", console)
    if update_docs:
        write_throughput_table(results["throughput"], source)
