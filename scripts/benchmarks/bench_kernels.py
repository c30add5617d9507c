"""How fast the batched LoRA operators are, beside the limits of memory and arithmetic.

Every workload is measured twice:

update         `lora_apply` on outputs that are there; its bytes are the adapters', x once and y read and written
with LoRA      `lora_linear`: the base linear and the update in one operator, as the engine calls it; its bytes are the
               weights' and the adapters'. What the update adds is the difference to `packed_linear` (`linears`) right
               before, and its limit is the adapters' bytes alone, since x and y are in the caches

A limit is the larger of: bytes that must move over measured bandwidth, flops over measured peak of a product. All
of a workload's contestants run in turn, round after round, so that other load on the machine meets all of them; medians
are reported. The limits are measured in the same run.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.lora_workloads import DEFAULT_MODEL, EIGHT_BILLION, ONE_BILLION, Batch, Model, Step, Workload
from benchmarks.machine_limits import Clock, Yardsticks, measure_all
from benchmarks.results import Row, report, threads_title
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


def main(
    output: Annotated[Path, typer.Option(help="Folder for kernels.csv.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(help="Times each contestant runs.")] = 21,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure the GPU instead of the CPU.")] = False,
) -> None:
    """Measure the batched LoRA operators."""
    console = Console()
    if threads:
        torch.set_num_threads(threads)
    device, workloads = ("cuda", gpu_workloads()) if gpu else ("cpu", cpu_workloads())
    title = torch.cuda.get_device_name() if gpu else cpu_title()
    rows: list[Row] = []
    with Progress(console=console) as progress:
        for workload in progress.track(workloads, description="measuring"):
            rows += measured(workload, device, rounds)
    report(rows, title, output, "kernels", console)


def cpu_title() -> str:
    """Processor, instruction set and threads."""
    implementation = capability() if load_cpu_kernels() else "reference"
    return f"{platform.processor() or platform.machine()}, {implementation}, {threads_title()}"
