"""How fast the batched LoRA operators are, beside what memory and arithmetic allow and beside two simpler ways.

limit      the larger of: bytes that must move over measured bandwidth, flops over measured peak of a matrix product
gather     weights padded to the largest rank, gathered by token, torch.bmm; shown as its time over ours, as is
GEMMs      two matrix products for each adapter

All of a workload's contestants run in turn, round after round, so that what else the machine does hits all of them;
medians are reported. The limits are measured in the same run. Bytes are the adapters', x once and y read and written,
of which a CPU finds x and y in its caches: `limit_of_adapters` in the CSV counts the adapters alone.
"""

from __future__ import annotations

import csv
import itertools
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench_rows import threads_title
from lora_workloads import Batch, Model, Step, Workload, llama
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from multilora_kernels import load_cpu_kernels
from multilora_kernels.segments import CHUNK_SIZE, PREFILL_CHUNK_SIZE

MAX_GATHERED_BYTES = 2 << 30

DEFAULT_MODEL = llama("135M", hidden=576, kv=192, ffn=1536, num_layers=30)
ONE_BILLION = llama("1B", hidden=2048, kv=512, ffn=8192, num_layers=16)
EIGHT_BILLION = llama("8B", hidden=4096, kv=1024, ffn=14336, num_layers=1)


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


@dataclass(frozen=True)
class Limits:
    """Measured in this run: bytes per second and floating-point operations per second."""

    bandwidth: float
    peak: float


@dataclass(frozen=True)
class Result:
    """Medians of one workload, seconds a step; NaN where a contestant was left out."""

    workload: str
    num_bytes: int
    num_flops: int
    ours: float
    gather_bmm: float
    gemm_per_adapter: float
    limit: float
    limit_of_adapters: float

    @property
    def fraction(self) -> float:
        """Of the limit."""
        return self.limit / self.ours


class Clock:
    """Times a step; on a GPU captured once as a CUDA graph and replayed."""

    def __init__(self, device: str) -> None:
        self.device = device

    def prepare(self, step: Step) -> Step:
        """What is to be timed: the step itself, or the replay of its graph."""
        step()
        if self.device == "cpu":
            return step
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def seconds(self, prepared: Step) -> float:
        """Of one run."""
        self._wait()
        start = time.perf_counter()
        prepared()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def measure(steps: dict[str, Step], clock: Clock, rounds: int) -> dict[str, float]:
    """Median seconds of each step, all of them once a round."""
    prepared = {name: clock.prepare(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in prepared.items():
            times[name].append(clock.seconds(step))
    return {name: statistics.median(values) for name, values in times.items()}


def limit_steps(device: str, dtype: torch.dtype) -> tuple[dict[str, Step], dict[str, float]]:
    """Steps that only move memory or only multiply, and the bytes or flops of each.

    A CPU multiplies through oneDNN: the MKL behind torch's `@` reaches half of its speed on AMD's processors.
    """
    numel, n = (1 << 25, 1024) if device == "cpu" else (1 << 28, 8192)
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    matrix = torch.randn(n, n, device=device, dtype=dtype)
    multiply = onednn_linear if device == "cpu" else torch.matmul
    steps: dict[str, Step] = {
        "copy": lambda: void(target.copy_(source)),
        "read": lambda: void(source.sum()),
        "multiply": lambda: void(multiply(matrix, matrix)),
    }
    return steps, {"copy": 2.0 * source.nbytes, "read": float(source.nbytes), "multiply": 2.0 * n**3}


def onednn_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T by oneDNN. weight: plain, or as `torch.ops.mkldnn._reorder_linear_weight` packed it for some rows."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def void(_: torch.Tensor) -> None:
    """Drops a result."""


def bench(workload: Workload, device: str, rounds: int) -> Result:
    """Contestants and limits of one workload, measured together."""
    lora_dtype, dtype = torch.bfloat16, torch.float32 if device == "cpu" else torch.bfloat16
    batch, clock = Batch(workload, lora_dtype, dtype, device), Clock(device)
    steps: dict[str, Step] = {"ours": batch.ours, "gemm_per_adapter": batch.gemm_per_adapter()}
    if batch.gathered_bytes() <= MAX_GATHERED_BYTES:
        steps["gather_bmm"] = batch.gather_bmm()
    yardsticks, work = limit_steps(device, dtype)
    times = measure(steps | yardsticks, clock, rounds)
    limits = Limits(
        bandwidth=max(work[name] / times[name] for name in ("copy", "read")), peak=work["multiply"] / times["multiply"]
    )
    num_bytes, num_flops = workload.num_bytes(lora_dtype, dtype), workload.num_flops()
    return Result(
        workload.name,
        num_bytes,
        num_flops,
        times["ours"],
        times.get("gather_bmm", float("nan")),
        times["gemm_per_adapter"],
        limit=max(num_bytes / limits.bandwidth, num_flops / limits.peak),
        limit_of_adapters=workload.adapter_bytes(lora_dtype) / limits.bandwidth,
    )


def bench_all(workloads: list[Workload], device: str, rounds: int, console: Console) -> Iterator[Result]:
    """One workload after another, with a progress bar."""
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(workloads))
        for workload in workloads:
            progress.update(task, description=workload.name)
            yield bench(workload, device, rounds)
            progress.advance(task)


def print_results(results: list[Result], title: str, console: Console) -> None:
    """One row a workload."""
    table = Table(Column("workload", no_wrap=True), "ms", "MB", "GFLOP", "of limit", "gather", "GEMMs", title=title)
    for r in results:
        ratios = (r.fraction, r.gather_bmm / r.ours, r.gemm_per_adapter / r.ours)
        share, gather, gemm = f"{ratios[0]:.0%}", *(f"{ratio:.1f}x" for ratio in ratios[1:])
        table.add_row(
            r.workload,
            f"{r.ours * 1e3:.2f}",
            f"{r.num_bytes / 1e6:.0f}",
            f"{r.num_flops / 1e9:.2f}",
            share,
            gather,
            gemm,
        )
    console.print(table)


def write_results(results: list[Result], title: str, output: Path) -> None:
    """`kernels.csv` and `kernels.png` in a folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    output.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) | {"fraction_of_limit": result.fraction} for result in results]
    with (output / "kernels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.6 * len(results)))
    places = range(len(results))
    for offset, name in ((-0.3, "ours"), (-0.1, "gather_bmm"), (0.1, "gemm_per_adapter"), (0.3, "limit")):
        axes.barh([p + offset for p in places], [getattr(r, name) * 1e3 for r in results], 0.2, label=name)
    axes.set(
        yticks=list(places), yticklabels=[r.workload for r in results], xscale="log", xlabel="ms a step", title=title
    )
    axes.invert_yaxis()
    axes.legend()
    figure.tight_layout()
    figure.savefig(output / "kernels.png", dpi=150)


def print_aot(console: Console) -> None:
    """Registers, spilled bytes and shared memory of every kernel, shape and GPU generation, compiled here and now."""
    from multilora_kernels.cuda import aot

    def describe(used: aot.Resources) -> str:
        return f"{used.registers} / {used.spilled_bytes} / {used.shared_bytes // 1024}"

    gpus = (80, 90, 100)
    title = "registers / spilled bytes / shared KiB"
    table = Table("kernel", "linear", "rank", "chunk", *(f"sm_{gpu}" for gpu in gpus), title=title)
    linears = dict(zip(("q|k|v", "o", "gate|up", "down"), EIGHT_BILLION.linears, strict=True))
    kernels = {"shrink": aot.shrink_resources, "expand": aot.expand_resources}
    rows = list(itertools.product(kernels, linears, (16, 64), (CHUNK_SIZE, PREFILL_CHUNK_SIZE)))
    with Progress(console=console) as progress:
        for kernel, linear, rank, chunk in progress.track(rows, description="compiling"):
            used = [kernels[kernel](linears[linear], chunk, rank, "bf16", gpu) for gpu in gpus]
            table.add_row(kernel, linear, str(rank), str(chunk), *map(describe, used))
    hidden, head_dim, group = EIGHT_BILLION.linears[0].in_features, 128, 4
    others = {
        "decode attention": lambda gpu: aot.decode_resources(group, head_dim, 16, "bf16", gpu),
        "its splits added": lambda gpu: aot.combine_resources(head_dim, "bf16", gpu),
        "add_rms_norm": lambda gpu: aot.add_rms_norm_resources(hidden, "bf16", gpu),
        "silu_mul": lambda gpu: aot.silu_mul_resources("bf16", gpu),
    }
    for kernel, resources in others.items():
        table.add_row(kernel, "", "", "", *(describe(resources(gpu)) for gpu in gpus))
    console.print(table)


def main(
    output: Annotated[Path, typer.Option(help="Folder for kernels.csv and kernels.png.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(help="Times each contestant runs.")] = 21,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure the GPU instead of the CPU.")] = False,
    aot: Annotated[bool, typer.Option("--aot", help="Only compile the GPU kernels and print what they cost.")] = False,
) -> None:
    """Measure the batched LoRA operators."""
    console = Console()
    if aot:
        print_aot(console)
        return
    if threads:
        torch.set_num_threads(threads)
    device, workloads = ("cuda", gpu_workloads()) if gpu else ("cpu", cpu_workloads())
    title = torch.cuda.get_device_name() if gpu else cpu_title()
    results = list(bench_all(workloads, device, rounds, console))
    print_results(results, title, console)
    write_results(results, title, output)
    console.print(f"Wrote {output}/kernels.csv and {output}/kernels.png")


def cpu_title() -> str:
    """Processor, instruction set and threads."""
    implementation = torch.ops.multilora.cpu_capability() if load_cpu_kernels() else "reference"
    return f"{platform.processor() or platform.machine()}, {implementation}, {threads_title()}"


if __name__ == "__main__":
    typer.run(main)
