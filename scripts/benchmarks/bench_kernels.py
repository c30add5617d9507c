"""How fast the batched LoRA operators are, beside the limits of memory and arithmetic.

Every workload is measured twice:

update         `lora_apply` on outputs that are there; its bytes are the adapters', x once and y read and written
with LoRA      `lora_linear`: the base linear and the update in one operator, as the engine calls it; its bytes are the
               weights' and the adapters'. What the update adds is the difference to `packed_linear` (`linears`) right
               before, and its limit is the adapters' bytes alone, since x and y are in the caches

Experts of mixtures (`expert_mlp`) are measured alone and with adapters of rank 16 on all experts, a different one for
each of up to 16 rows, and one for a prompt. Their bytes are those of the experts that the rows use, and of the adapters
of these experts.

A limit is the larger of: bytes that must move over measured bandwidth, flops over measured peak of a product. All
of a workload's contestants run in turn, round after round, so that other load on the machine meets all of them; medians
are reported. The limits are measured in the same run.
"""

from __future__ import annotations

import itertools
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.lora_workloads import (
    DEFAULT_MODEL,
    EIGHT_BILLION,
    OLMOE,
    ONE_BILLION,
    QWEN3_MOE,
    Batch,
    ExpertBatch,
    Mixture,
    Model,
    Step,
    Workload,
)
from benchmarks.machine_limits import Clock, Yardsticks, measure_all
from benchmarks.results import Row, at_least, at_most, report, threads_title
from multilora_kernels import load_cpu_kernels
from multilora_kernels.cpu import capability

_LEAST_ADDED = 0.03
"""A share of a linear's time: an update that adds less is not told from other load on the machine."""


def cpu_workloads() -> list[Workload]:
    """Decode steps of two models with all adapters distinct."""
    models = (DEFAULT_MODEL, ONE_BILLION)
    return [Workload(model, rows, rows, (16,)) for model in models for rows in (1, 8, 16, 32)]


def gpu_workloads() -> list[Workload]:
    """Decode with distinct adapters, one shared adapter, prefill; layers enough that weights exceed the L2 cache."""
    layers = Model(EIGHT_BILLION.name, EIGHT_BILLION.linears, 32)
    return [
        Workload(EIGHT_BILLION, 64, 64, (16,)),
        Workload(EIGHT_BILLION, 64, 64, (64,)),
        Workload(EIGHT_BILLION, 64, 64, (8, 16, 32, 64)),
        Workload(layers, 1, 1, (16,)),
        Workload(layers, 256, 1, (16,)),
        Workload(layers, 256, 1, (64,)),
        Workload(EIGHT_BILLION, 8192, 4, (64,)),
        Workload(EIGHT_BILLION, 8192, 1, (64,)),
    ]


def median_difference(times: Sequence[float], others: Sequence[float]) -> float:
    """The median difference of times taken one after the other: other load on the machine during both is not in it."""
    return statistics.median(time - other for time, other in zip(times, others, strict=True))


def measured(workload: Workload, device: str, rounds: int) -> list[Row]:
    """Contestants of one workload, and the shares of their limits that they reach, measured together."""
    lora_dtype, dtype = torch.bfloat16, torch.float32 if device == "cpu" else torch.bfloat16
    batch, clock = Batch(workload, lora_dtype, dtype, device), Clock(device)
    linears, lora_linears = batch.base_linears()
    steps: dict[str, Step] = {"update": batch.update, "linears": linears, "with LoRA": lora_linears}
    yardsticks = Yardsticks(device, dtype)
    all_times = measure_all(steps | yardsticks.steps, clock, rounds)
    times = {name: statistics.median(values) for name, values in all_times.items()}
    limits = yardsticks.limits(times)
    adapter_bytes, num_flops = workload.adapter_bytes(lora_dtype), workload.num_flops()
    added = median_difference(all_times["with LoRA"], all_times["linears"])
    least = {
        "update": limits.seconds(workload.num_bytes(lora_dtype, dtype), num_flops),
        "linears": limits.seconds(workload.weight_bytes(dtype), workload.weight_flops()),
        "with LoRA": limits.seconds(workload.weight_bytes(dtype) + adapter_bytes, workload.weight_flops() + num_flops),
    }
    if added > _LEAST_ADDED * times["linears"]:
        times["LoRA adds"], least["LoRA adds"] = added, limits.seconds(adapter_bytes, 0)
    return [
        row
        for name, limit in least.items()
        for row in (
            Row(f"{workload.name}: {name}", times[name] * 1e3, "ms"),
            Row(f"{workload.name}: {name}, of the limit", 100 * limit / times[name], "%"),
        )
    ]


_EXPERT_ROWS, _PROMPT_ROWS = (1, 8, 16), 1024
"""Rows of decode steps, and of a prompt."""

_MOST_OF_LIMIT = {"bfloat16": 1.5, "w4a16": 1.8, "prompt": 2.0}
_LEAST_OF_BASE = 0.85
"""Goals: times of the limits, and tokens with adapters beside those without."""


def measured_experts(mixture: Mixture, num_rows: int, has_codes: bool, device: str, rounds: int) -> list[Row]:
    """The experts of a mixture, without and with adapters, beside their limits."""
    is_prompt = num_rows == _PROMPT_ROWS
    batch = ExpertBatch(mixture, num_rows, has_codes, device, num_adapters=1 if is_prompt else 16)
    clock = Clock(device)
    yardsticks = Yardsticks(device, torch.bfloat16)
    (first, *others) = yardsticks.steps.items()
    # Between the two contestants something else passes through the caches.
    steps = {"experts": batch.base, **dict([first]), "with adapters": batch.with_adapters, **dict(others)}
    times = {name: statistics.median(values) for name, values in measure_all(steps, clock, rounds).items()}
    limits = yardsticks.limits(times)
    kind = "w4a16" if has_codes else "bfloat16"
    name, goal = f"{mixture.name} {kind} {num_rows} rows", _MOST_OF_LIMIT["prompt" if is_prompt else kind]
    least = {
        "experts": limits.seconds(batch.base_bytes, batch.base_flops),
        "with adapters": limits.seconds(batch.base_bytes + batch.adapter_bytes, batch.base_flops + batch.adapter_flops),
    }
    rows = []
    for contestant, limit in least.items():
        rows.append(Row(f"{name}: {contestant}", times[contestant] * 1e3 / mixture.num_layers, "ms a layer"))
        rows.append(at_most(f"{name}: {contestant}, of the limit", times[contestant] / limit, "x", goal))
    share = times["experts"] / times["with adapters"]
    rows.append(at_least(f"{name}: tokens with adapters, of those without", share, "x", _LEAST_OF_BASE))
    return rows


def main(
    output: Annotated[Path, typer.Option(help="Folder for kernels.csv.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(help="Times each contestant runs.")] = 21,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure the GPU instead of the CPU.")] = False,
    experts: Annotated[bool, typer.Option("--experts", help="Measure mixtures of experts only.")] = False,
) -> None:
    """Measure the batched LoRA operators."""
    console = Console()
    if threads:
        torch.set_num_threads(threads)
    device, workloads = ("cuda", gpu_workloads()) if gpu else ("cpu", cpu_workloads())
    title = torch.cuda.get_device_name() if gpu else cpu_title()
    rows: list[Row] = []
    mixtures = list(itertools.product((OLMOE, QWEN3_MOE), (*_EXPERT_ROWS, _PROMPT_ROWS), (False, True)))
    with Progress(console=console) as progress:
        for workload in progress.track([] if experts else workloads, description="measuring"):
            rows += measured(workload, device, rounds)
        for mixture, num_rows, has_codes in progress.track(mixtures, description="measuring experts"):
            fewer = rounds // 3 if num_rows == _PROMPT_ROWS else rounds
            rows += measured_experts(mixture, num_rows, has_codes, device, fewer)
    report(rows, title, output, "kernels", console)


def cpu_title() -> str:
    """Processor, instruction set and threads."""
    implementation = capability() if load_cpu_kernels() else "reference"
    return f"{platform.processor() or platform.machine()}, {implementation}, {threads_title()}"
