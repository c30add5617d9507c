"""How fast the batched LoRA operators are, beside the limits of memory and arithmetic and beside two simpler ways.

Every workload is measured twice:

update alone       `lora_apply` on outputs that are there; its bytes are the adapters', x once and y read and written
within the linear  `lora_linear`: the base linear and the update in one operator, as the engine calls it; its bytes are
                   the weights' and the adapters'. What the update adds is the difference to `packed_linear` right
                   before, and its limit is the adapters' bytes alone, since x and y are in the caches

limit      the larger of: bytes that must move over measured bandwidth, flops over measured peak of a matrix product
gather     weights padded to the largest rank, gathered by token, torch.bmm; shown as its time over the update's, as is
GEMMs      two matrix products for each adapter

All of a workload's contestants run in turn, round after round, so that other load on the machine meets all of them;
medians are reported. The limits are measured in the same run.
"""

from __future__ import annotations

import csv
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from benchmarks.bench_rows import threads_title
from benchmarks.lora_workloads import Batch, Model, Step, Workload
from benchmarks.machine_limits import Clock, Yardsticks, measure_all
from benchmarks.model_shapes import DEFAULT_MODEL, EIGHT_BILLION, ONE_BILLION
from multilora_kernels import load_cpu_kernels
from multilora_kernels.cpu import capability

MAX_GATHERED_BYTES = 2 << 30
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


@dataclass(frozen=True)
class Result:
    """Medians of one workload, seconds a step; NaN where a contestant was left out.

    num_bytes, num_flops: of the updates alone. limit: their limit. added: the time that they add to the linears.
    lora_linears_limit: of linears and updates together.
    bandwidth, peak: of the machine meanwhile, bytes and flops a second.
    """

    workload: str
    num_bytes: int
    num_flops: int
    update: float
    gather_bmm: float
    gemm_per_adapter: float
    linears: float
    lora_linears: float
    added: float
    limit: float
    limit_of_adapters: float
    lora_linears_limit: float
    bandwidth: float
    peak: float

    @property
    def fraction(self) -> float:
        """The share of its limit that the update alone reaches."""
        return self.limit / self.update

    @property
    def lora_linears_fraction(self) -> float:
        """The share of their limit that linears and updates reach together."""
        return self.lora_linears_limit / self.lora_linears

    @property
    def added_fraction(self) -> float:
        """The share of its limit that the updates reach in the time that they add to the linears."""
        return self.limit_of_adapters / self.added

    @property
    def is_added_told(self) -> bool:
        """Whether the updates add enough to the linears to be told from other load on the machine."""
        return self.added > _LEAST_ADDED * self.linears


def median_difference(times: list[float], others: list[float]) -> float:
    """The median difference of times taken one after the other: other load on the machine during both is not in it."""
    return statistics.median(time - other for time, other in zip(times, others, strict=True))


def bench(workload: Workload, device: str, rounds: int) -> Result:
    """Contestants and limits of one workload, measured together."""
    lora_dtype, dtype = torch.bfloat16, torch.float32 if device == "cpu" else torch.bfloat16
    batch, clock = Batch(workload, lora_dtype, dtype, device), Clock(device)
    linears, lora_linears = batch.base_linears()
    steps: dict[str, Step] = {
        "update": batch.update,
        "gemm_per_adapter": batch.gemm_per_adapter(),
        "linears": linears,
        "lora_linears": lora_linears,
    }
    if batch.gathered_bytes() <= MAX_GATHERED_BYTES:
        steps["gather_bmm"] = batch.gather_bmm()
    yardsticks = Yardsticks(device, dtype)
    all_times = measure_all(steps | yardsticks.steps, clock, rounds)
    times = {name: statistics.median(values) for name, values in all_times.items()}
    limits = yardsticks.limits(times)
    num_bytes, num_flops = workload.num_bytes(lora_dtype, dtype), workload.num_flops()
    adapter_bytes = workload.adapter_bytes(lora_dtype)
    return Result(
        workload.name,
        num_bytes,
        num_flops,
        times["update"],
        times.get("gather_bmm", float("nan")),
        times["gemm_per_adapter"],
        times["linears"],
        times["lora_linears"],
        median_difference(all_times["lora_linears"], all_times["linears"]),
        limit=limits.seconds(num_bytes, num_flops),
        limit_of_adapters=limits.seconds(adapter_bytes, 0),
        lora_linears_limit=limits.seconds(
            workload.weight_bytes(dtype) + adapter_bytes, workload.weight_flops() + num_flops
        ),
        bandwidth=limits.bandwidth,
        peak=limits.peak,
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
    """One row a workload, in one table for the updates alone and one for those within their linears."""
    alone = Table(Column("update alone", no_wrap=True), "ms", "MB", "of limit", "gather", "GEMMs", title=title)
    within = Table(
        Column("within the linear", no_wrap=True),
        "linear ms",
        "with LoRA ms",
        "of limit",
        "LoRA adds ms",
        "its bytes' ms",
        "of its limit",
        title=title,
    )
    for r in results:
        alone.add_row(
            r.workload,
            f"{r.update * 1e3:.2f}",
            f"{r.num_bytes / 1e6:.0f}",
            f"{r.fraction:.0%}",
            f"{r.gather_bmm / r.update:.1f}x",
            f"{r.gemm_per_adapter / r.update:.1f}x",
        )
        within.add_row(
            r.workload,
            f"{r.linears * 1e3:.2f}",
            f"{r.lora_linears * 1e3:.2f}",
            f"{r.lora_linears_fraction:.0%}",
            f"{r.added * 1e3:.2f}",
            f"{r.limit_of_adapters * 1e3:.2f}",
            f"{r.added_fraction:.0%}" if r.is_added_told else "(noise)",
        )
    console.print(alone)
    console.print(within)


def write_results(results: list[Result], title: str, output: Path) -> None:
    """`kernels.csv` and `kernels.png` in a folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    output.mkdir(parents=True, exist_ok=True)
    rows = [
        asdict(r)
        | {
            "fraction_of_limit": r.fraction,
            "lora_linears_fraction_of_limit": r.lora_linears_fraction,
            "added_fraction_of_limit": r.added_fraction,
        }
        for r in results
    ]
    with (output / "kernels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    panels = {
        "update alone": ("update", "gather_bmm", "gemm_per_adapter", "limit"),
        "within the linear": ("linears", "lora_linears", "lora_linears_limit"),
    }
    figure, axes = pyplot.subplots(len(panels), figsize=(9, 2 + 1.2 * len(results)))
    places = range(len(results))
    for axis, (panel, names) in zip(axes, panels.items(), strict=True):
        height = 0.8 / len(names)
        for i, name in enumerate(names):
            ms = [getattr(r, name) * 1e3 for r in results]
            axis.barh([p + (i - (len(names) - 1) / 2) * height for p in places], ms, height, label=name)
        axis.set(yticks=list(places), yticklabels=[r.workload for r in results], xscale="log", xlabel="ms a step")
        axis.set_title(f"{panel}: {title}")
        axis.invert_yaxis()
        axis.legend()
    figure.tight_layout()
    figure.savefig(output / "kernels.png", dpi=150)
    pyplot.close(figure)


def main(
    output: Annotated[Path, typer.Option(help="Folder for the tables and plots.")] = Path("bench_results"),
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
    results = list(bench_all(workloads, device, rounds, console))
    print_results(results, title, console)
    write_results(results, title, output)
    console.print(f"Wrote {output}/kernels.csv and {output}/kernels.png")


def cpu_title() -> str:
    """Processor, instruction set and threads."""
    implementation = capability() if load_cpu_kernels() else "reference"
    return f"{platform.processor() or platform.machine()}, {implementation}, {threads_title()}"
