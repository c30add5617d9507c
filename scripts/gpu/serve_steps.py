"""The steps of `scripts/gpu_serve` that need its packages.

`python -m gpu.serve_steps STEP ROWS WORK [--dry-run] [--no-tritonserver]` runs one, and appends its rows to a file as
JSON lines, each as soon as it is known. WORK: the folder in which a step leaves what later ones need.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import math
import multiprocessing
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import aclosing, closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType

import numpy as np
import torch

from benchmarks.adapter_bench import random_wire
from benchmarks.engine_in_process import EngineInProcess
from checkpoints.random_llama import character_of, save_random_llama
from checkpoints.telling_adapters import MAX_RANK, PROMPT_TOKENS, answer, packed_adapter, save_checkpoint
from gpu.machine import Row
from gpu.model_steps import EIGHT_BILLION, RANK, TINY
from gpu.report import DRY_PATIENCE
from gpu.serve import STEPS
from gpu.served import Client, EngineCalls, Served, ask_of, client_of, engine_calls, engine_process, served
from gpu.telling_load import CANCELLED, STREAMED, UNLOADS, UPLOADS, WHOLE, Work, judge, num_checked
from multilora_client import Adapter, AdapterTensors
from multilora_client.bench.load import Sample, run_closed
from multilora_client.bench.report import Summary, summarise
from multilora_client.bench.workload import Job, Target
from multilora_client.errors import MultiloraClientError
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.models.model_config import ModelConfig
from multilora_wire.layout import AdapterLayout, adapter_pages
from trials.judging_clients import Tally, text_of


@dataclass(frozen=True)
class Sizes:
    """counts: requests at once, those of the goal first; each of so many tokens, with answers of so many.

    telling: adapters of the telling model, of which a GPU's device tier holds `places`; goal: checked answers, by so
    many processes of clients, within so many seconds.
    """

    shape: ModelConfig
    counts: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    telling: int
    places: int
    goal: int
    processes: int
    seconds: float


REAL = Sizes(EIGHT_BILLION, (64, 1, 8, 128), 1024, 128, 64, 16, 10_000, 8, 45.0)
DRY = Sizes(TINY, (2, 1), 8, 12, 6, 2, 60, 1, 60.0)


@dataclass(frozen=True)
class Setting:
    """Where and how a step runs."""

    work: Path
    is_dry: bool
    has_tritonserver: bool

    @property
    def sizes(self) -> Sizes:
        return DRY if self.is_dry else REAL

    @property
    def telling(self) -> Path:
        """The checkpoint whose adapters tell their numbers."""
        return self.work / "telling"

    @property
    def model(self) -> Path:
        """The checkpoint whose speed is measured."""
        return self.work / "model"

    @property
    def layer(self) -> Path:
        """One layer of it: it has the same kernels, and few weights."""
        return self.work / "layer"

    @property
    def device(self) -> dict[str, str]:
        return {"device": "cpu", "num_threads": "1"} if self.is_dry else {"device": "cuda"}

    def telling_parameters(self) -> dict[str, str]:
        """Of a telling model whose device tier holds `places` of its adapters."""
        sizes = self.sizes
        parameters = {
            "max_num_seqs": str(sizes.telling),
            "max_loras": str(sizes.places),
            "max_lora_rank": str(MAX_RANK),
            "lora_dtype": "float32",
            "kv_cache_memory_bytes": "64MiB" if self.is_dry else "1GiB",
            "lora_cache_host_memory_bytes": "64MiB",
        }
        if not self.is_dry:
            layout = checkpoint_layout(self.telling, MAX_RANK, "float32")
            adapters = [packed_adapter(number, 0, layout).pages.nbytes for number in range(sizes.telling)]
            free, _ = torch.cuda.mem_get_info()
            tier = (sizes.places + 0.5) * statistics.mean(adapters) / (0.9 * free)
            parameters["lora_cache_gpu_memory_fraction"] = f"{tier:.12f}"
        return self.device | parameters

    def model_parameters(self) -> dict[str, str]:
        """Of the model whose speed is measured, with room for an adapter a sequence."""
        sizes = self.sizes
        layout = checkpoint_layout(self.layer, RANK, "bfloat16")
        adapter_bytes = sizes.shape.num_layers * adapter_pages(layout, RANK) * layout.page_bytes
        return (
            self.device
            | {
                "max_num_seqs": str(max(sizes.counts)),
                "max_lora_rank": str(RANK),
                "lora_dtype": "bfloat16",
                "max_model_len": str(4 * (sizes.prompt_tokens + sizes.output_tokens)),
                "lora_cache_host_memory_bytes": str((max(sizes.counts) + 1) * adapter_bytes),
            }
            | ({"kv_cache_memory_bytes": "16MiB"} if self.is_dry else {})
        )


def prepare(setting: Setting) -> Iterator[Row]:
    """Write the checkpoints, and meanwhile start engines over small ones, which compiles all kernels into the cache.

    One engine after the other: each measures what memory is free.
    """
    save_random_llama(setting.layer, setting.sizes.shape, 1)
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(_write_model, setting)
        yield Row("engine of one layer ready, empty cache of kernels", _start_layer(setting), "s")
        save_checkpoint(setting.telling)
        seconds = _start(setting.telling, setting.telling_parameters())
        yield Row("engine of the telling model ready, few kernels cached", seconds, "s")
        yield Row("checkpoint written", writing.result(), "s")
    if not setting.is_dry:  # a CPU's kernels are in no cache that could be empty
        yield Row("engine of one layer ready, full cache of kernels", _start_layer(setting), "s")
    num_bytes = sum(file.stat().st_size for file in setting.model.iterdir())
    num_files = len(list(setting.model.glob("*.safetensors")))
    yield Row("checkpoint", num_bytes / (1 << 30), "GiB", note=f"{num_files} files")


def _write_model(setting: Setting) -> float:
    started, shape = time.monotonic(), setting.sizes.shape
    save_random_llama(setting.model, shape, shape.num_layers)
    return time.monotonic() - started


def _start_layer(setting: Setting) -> float:
    return _start(setting.layer, setting.model_parameters() | {"kv_cache_memory_bytes": "2GiB"})


def _start(model: Path, parameters: Mapping[str, str], variables: Mapping[str, str] = MappingProxyType({})) -> float:
    """Seconds until the engine's process is ready."""
    started = time.monotonic()
    with engine_process(model, parameters, variables):
        return time.monotonic() - started


def count_wrong_answers(setting: Setting) -> Iterator[Row]:
    """Clients of the telling model; raises SystemExit for a wrong answer, or when there were too few."""
    sizes, started = setting.sizes, time.monotonic()
    with served(setting.telling, setting.telling_parameters(), setting.has_tritonserver) as server:
        yield Row("ready", time.monotonic() - started, "s", note=f"by {server.by}")
        tally, seconds = _judge_by_processes(server, setting.telling, sizes)
        with engine_calls(server) as calls:
            device = asyncio.run(calls.tiers())["device"]
    checked = num_checked(tally)
    errors = {code: count for code, count in tally.seen.items() if code.isupper()}
    yield Row("checked answers", checked, of_limit=checked / sizes.goal, note=f"{checked / seconds:,.0f} a second")
    yield Row("wrong answers", len(tally.wrong), note="; ".join(tally.wrong[:3]))
    for name in (STREAMED, WHOLE, CANCELLED, UPLOADS, UNLOADS):
        yield Row(name, tally.seen[name])
    for code, count in errors.items():
        yield Row(f"errors {code}", count, note=tally.messages[code])
    note = f"of {sizes.telling}; {device['copies']:.0f} copies to the device, {device['evictions']:.0f} evictions"
    yield Row("adapters in the device tier", device["num_adapters"], note=note)
    if tally.wrong or checked < sizes.goal:
        raise SystemExit(f"{len(tally.wrong)} of {checked} answers are wrong; {sizes.goal} were to be checked")


def _judge_by_processes(server: Served, model: Path, sizes: Sizes) -> tuple[Tally, float]:
    """What all clients saw, and the seconds that they took."""
    numbers = [range(sizes.telling)[n :: sizes.processes] for n in range(sizes.processes)]
    works = [Work(server, model, each, -(-sizes.goal // sizes.processes), sizes.seconds) for each in numbers]
    total = Tally()
    with ProcessPoolExecutor(sizes.processes, multiprocessing.get_context("spawn")) as pool:
        # They import first, and begin together.
        list(pool.map(_is_ready, works))
        started = time.monotonic()
        for tally in pool.map(judge, works):
            total.seen.update(tally.seen)
            total.wrong += tally.wrong
            total.messages = tally.messages | total.messages
        return total, time.monotonic() - started


def _is_ready(work: Work) -> int:
    return os.getpid()


_BASE, _ONE, _MANY = "no adapter", "one adapter", "all different"
_MIXES = (_MANY, _BASE, _ONE)
"""Of the requests of a wave, which start together."""


def measure_speed(setting: Setting) -> Iterator[Row]:
    """The same requests through the server and to the engine in this process, and a start with no kernel cached."""
    sizes, parameters, started = setting.sizes, setting.model_parameters(), time.monotonic()
    mixes = [(count, kind) for count in sizes.counts for kind in _MIXES if (count, kind) != (1, _MANY)]
    rates: dict[tuple[int, str], float] = {}
    with ThreadPoolExecutor() as threads:
        packing = threads.submit(_random_adapter, setting.model)
        with served(setting.model, parameters, setting.has_tritonserver) as server:
            yield Row("ready, kernels cached", time.monotonic() - started, "s", note=f"by {server.by}, with weights")
            with engine_calls(server) as calls, asyncio.Runner() as runner:
                put_at = time.monotonic()
                runner.run(_put_all(calls, packing.result(), max(sizes.counts)))
                yield Row("adapters put", max(sizes.counts), note=f"in {time.monotonic() - put_at:.1f} s")
                prompts = Prompts(setting)
                runner.run(_wave(server, calls, prompts, max(sizes.counts), _MANY, sizes.output_tokens))
                for count, kind in mixes:
                    before = time.process_time()
                    samples = runner.run(_wave(server, calls, prompts, count, kind, sizes.output_tokens))
                    summary = summarise(samples)
                    rates[count, kind] = summary.tokens_per_s
                    client = (time.process_time() - before) / summary.seconds
                    yield from _rows_of_wave(_name(count, kind), summary, f"the client took {client:.0%} of a core")
    with closing(EngineInProcess(setting.model, parameters)) as engine:
        for lora_task_id in range(1, max(sizes.counts) + 1):
            engine.put(lora_task_id, packing.result())
        engine.tokens_per_s(prompts.some(max(sizes.counts)), sizes.output_tokens, _task_ids(max(sizes.counts), _MANY))
        for count, kind in mixes:
            rate = engine.tokens_per_s(prompts.some(count), sizes.output_tokens, _task_ids(count, kind))
            note = f"through the server {rates[count, kind] / rate:.0%} of it"
            yield Row(f"{_name(count, kind)}, engine in this process", rate, "tokens/s", note=note)
    if not setting.is_dry:
        seconds = _start(setting.model, parameters, {"TRITON_CACHE_DIR": str(setting.work / "no_kernels")})
        yield Row("engine's process ready, empty cache of kernels", seconds, "s", note="with weights")


def _rows_of_wave(name: str, summary: Summary, note: str) -> Iterator[Row]:
    errors = "".join(f"; {count} {code}" for code, count in summary.errors.items())
    yield Row(f"{name}: through the server", summary.tokens_per_s, "tokens/s", note=note + errors)
    for what, times in (("first token", summary.first_token), ("between tokens", summary.gap)):
        if not math.isnan(times.p50):
            yield Row(f"{name}: {what}", times.p50 * 1e3, "ms", note=f"p99 {times.p99 * 1e3:.1f} ms")


def _name(count: int, kind: str) -> str:
    return f"{count} at once, {kind}"


def _task_ids(count: int, kind: str) -> list[int | None]:
    """The adapter of each of so many requests: they are numbered from 1."""
    mixes: dict[str, list[int | None]] = {
        _BASE: [None] * count,
        _ONE: [1] * count,
        _MANY: [*range(1, count + 1)],
    }
    return mixes[kind]


class Prompts:
    """Random texts of the model, of which no two share a prefix."""

    def __init__(self, setting: Setting) -> None:
        self._random = Random(0)
        self._characters = [character_of(token) for token in range(setting.sizes.shape.vocab_size)]
        self._num_tokens = setting.sizes.prompt_tokens

    def some(self, count: int) -> list[str]:
        return ["".join(self._random.choices(self._characters, k=self._num_tokens)) for _ in range(count)]


async def _wave(
    server: Served, calls: EngineCalls, prompts: Prompts, count: int, kind: str, output_tokens: int
) -> list[Sample]:
    """Send so many requests at the same time, once."""
    no_weights = AdapterTensors(np.zeros((0, 0), np.float16), np.zeros((0, 4), np.int32), "FP16")
    adapters = [None if each is None else Adapter(each, no_weights) for each in _task_ids(count, kind)]
    jobs = [Job(Target(adapter), prompt) for adapter, prompt in zip(adapters, prompts.some(count), strict=True)]
    async with ask_of(server, calls, output_tokens) as ask:
        return await run_closed(ask, jobs, count, lambda: None)


def _random_adapter(model: Path) -> PackedAdapter:
    layout = checkpoint_layout(model, RANK, "bfloat16")
    return pack_adapter(*random_wire(layout, RANK, seed=0), layout)


async def _put_all(calls: EngineCalls, adapter: PackedAdapter, count: int) -> None:
    """Put an adapter under so many task ids. They share their numbers, and nothing else."""
    for lora_task_id in range(1, count + 1):
        await calls.put(lora_task_id, adapter)


def break_engine(setting: Setting) -> Iterator[Row]:
    """Seconds from an error that sticks, which `sticky_error` makes, to the next right answer."""
    number, parameters = 5, setting.telling_parameters() | {"lora_cache_dir": str(setting.work / "disk_tier")}
    (setting.work / "disk_tier").mkdir(exist_ok=True)
    layout, started = checkpoint_layout(setting.telling, MAX_RANK, "float32"), time.monotonic()
    with served(setting.telling, parameters, setting.has_tritonserver) as server, asyncio.Runner() as runner:
        yield Row("ready", time.monotonic() - started, "s", note=f"by {server.by}")
        seconds = STEPS["recovery"] * (DRY_PATIENCE if setting.is_dry else 1) - _SECONDS_OF_AN_END
        yield from runner.run(_break_engine(server, layout, number, started + seconds))


async def _break_engine(server: Served, layout: AdapterLayout, number: int, deadline: float) -> list[Row]:
    """deadline: of the right answer, by `time.monotonic`."""
    pid, errors = server.engine_pid, Counter[str]()
    assert pid is not None, "a server that is ready has an engine"
    async with client_of(server, layout) as client:
        await client.upload(number, 0)
        await _check_answer(client, number)
        os.kill(pid, signal.SIGUSR1)
        broken = time.monotonic()
        is_right = False
        while not is_right and time.monotonic() < deadline:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await _check_answer(client, number)
                is_right = server.engine_pid not in (pid, None)
            except MultiloraClientError as error:
                errors[error.code] += 1
            except TimeoutError:
                errors["no answer"] += 1
            await asyncio.sleep(_ASK_INTERVAL_S)
    seconds, seen = time.monotonic() - broken, ", ".join(f"{count} {code}" for code, count in errors.items())
    assert is_right, f"no other engine has answered within {seconds:.0f} s; until then {seen or 'no error'}"
    return [Row("right again after an error that sticks", seconds, "s", note=f"until then {seen}")]


_ASK_INTERVAL_S = 0.1

_SECONDS_OF_AN_END = 15.0
"""That the imports and the end of a step take: it fails before it is stopped, and says what its clients have seen."""


async def _check_answer(client: Client, number: int) -> None:
    expected = answer(number, 0)
    async with aclosing(client.ask(PROMPT_TOKENS[:7], len(expected), number, streams=False)) as pieces:
        text = "".join([piece async for piece in pieces])
    assert text == text_of(expected), f"adapter {number} answered {text!r}"


_STEPS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "prepare": prepare,
    "answers": count_wrong_answers,
    "speed": measure_speed,
    "recovery": break_engine,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=_STEPS)
    parser.add_argument("rows", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--no-tritonserver", action="store_true")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with asked.rows.open("a") as file:
        for row in _STEPS[asked.step](Setting(asked.work, asked.dry_run, not asked.no_tritonserver)):
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
