"""How fast the base model's linears are on a CPU, beside the limits of memory and arithmetic and beside torch's own.

int4, int8 and fp8 are codes with scales of bfloat16, one for GROUP_SIZE inputs; a limit counts their bytes too. "In
bfloat16" activations may be rounded.

limit      the larger of: bytes of the weights over measured read bandwidth, flops over measured peak of a product in
           the same arithmetic
F.linear   torch's linear over the plain weights in float32
oneDNN     the linear that torch.compile uses, over weights that oneDNN packed for this number of rows, in float32

A workload multiplies every weight of a list once: all linears of a decode step, a chunk of a prompt through one layer,
or copies of one shape, too many for a cache. All contestants run in turn, round after round, so that other load on the
machine meets all of them; medians are reported, and the limits are measured in the same run.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from benchmarks.bench_kernels import cpu_title
from benchmarks.lora_workloads import Model, Step
from benchmarks.machine_limits import Clock, Yardsticks, measure, onednn_linear, void
from benchmarks.model_shapes import DEFAULT_MODEL, ONE_BILLION
from multilora_kernels import (
    CodeType,
    HugePages,
    PackedWeight,
    QuantizedWeight,
    activation_dtype,
    packed_linear,
    quantized_linear,
)

FORMATS = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.float32),
    "bfloat16 in bfloat16": (torch.bfloat16, torch.bfloat16),
}
"""Types of float weights and of products, by name."""
CODE_FORMATS = {
    f"{code_type.value}{suffix}": (code_type, compute_dtype)
    for suffix, compute_dtype in (("", torch.float32), (" in bfloat16", torch.bfloat16))
    for code_type in (CodeType.INT4, CodeType.INT8, CodeType.FP8)
}
"""Codes and types of products, by name."""
GROUP_SIZE = 128
VOCABULARY = {DEFAULT_MODEL.name: 49152, ONE_BILLION.name: 128256}
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT_ROWS = (512, 2048)
MIN_BYTES = 96 << 20
"""The size of the float32 copies of one shape: more than a cache holds."""

Shape = tuple[int, int]
"""out_features, in_features."""

Product = Callable[[torch.Tensor, Any], torch.Tensor]

Inputs = dict[int, torch.Tensor]
"""[rows, in_features] by in_features."""


@dataclass(frozen=True)
class Workload:
    """Every weight of a list, times the same number of rows."""

    name: str
    shapes: tuple[Shape, ...]
    rows: int

    @property
    def num_weights(self) -> int:
        """Elements of all weights."""
        return sum(out_features * in_features for out_features, in_features in self.shapes)

    @property
    def num_flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.num_weights


def layer_shapes(model: Model) -> dict[str, Shape]:
    """The linears of one layer."""
    names = ("q|k|v", "o", "gate|up", "down")
    return {name: (linear.out_features, linear.in_features) for name, linear in zip(names, model.linears, strict=True)}


def step_workloads(model: Model, rows: Sequence[int]) -> list[Workload]:
    """All linears of a decode step, the head included."""
    layer = tuple(layer_shapes(model).values())
    head = (VOCABULARY[model.name], model.linears[0].in_features)
    return [Workload(f"{model.name} step, {n} rows", layer * model.num_layers + (head,), n) for n in rows]


def prompt_workloads(model: Model) -> list[Workload]:
    """A chunk of a prompt through the linears of one layer."""
    return [Workload(f"{model.name} layer, {n} rows", tuple(layer_shapes(model).values()), n) for n in PROMPT_ROWS]


def shape_workloads(model: Model, rows: Sequence[int]) -> list[Workload]:
    """One linear at a time, as often as makes MIN_BYTES."""
    return [
        Workload(f"{model.name} {name}, {n} rows", (shape,) * -(-MIN_BYTES // (4 * shape[0] * shape[1])), n)
        for name, shape in layer_shapes(model).items()
        for n in rows
    ]


@dataclass(frozen=True)
class Result:
    """Medians of one workload with weights of one type, seconds."""

    workload: str
    weights: str
    num_bytes: int
    num_flops: int
    ours: float
    torch_linear: float
    onednn: float
    limit: float

    @property
    def over_limit(self) -> float:
        """The time as a multiple of the limit."""
        return self.ours / self.limit


def multiply_all(
    multiply: Callable[[torch.Tensor, Any], torch.Tensor], x: Inputs, weights: list[tuple[int, Any]]
) -> Step:
    """A step over weights, each beside its number of inputs."""

    def step() -> None:
        for in_features, weight in weights:
            void(multiply(x[in_features], weight))

    return step


def contestants(workload: Workload) -> dict[str, Step]:
    """The steps of the contestants by name; ours once for each of `formats()` and of CODE_FORMATS."""
    x = {i: torch.randn(workload.rows, i) for _, i in workload.shapes}
    plain = [(i, torch.randn(o, i)) for o, i in workload.shapes]
    onednn = [(i, torch.ops.mkldnn._reorder_linear_weight(weight, workload.rows)) for i, weight in plain]
    steps = {
        "torch_linear": multiply_all(F.linear, x, plain),
        "onednn": multiply_all(onednn_linear, x, onednn),
    }
    for name, (dtype, compute_dtype) in formats().items():
        pages = HugePages()
        packed = [(i, pack(weight, dtype, pages, compute_dtype)) for i, weight in plain]
        steps[name] = multiply_all(packed_linear, x, packed)
    for name, (code_type, compute_dtype) in CODE_FORMATS.items():
        pages = HugePages()
        quantized = [(i, random_codes((o, i), code_type, pages, compute_dtype)) for o, i in workload.shapes]
        steps[name] = multiply_all(quantized_linear, x, quantized)
    return steps


def formats() -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """The types in FORMATS that this processor has kernels for."""
    cpu = torch.device("cpu")
    return {name: types for name, types in FORMATS.items() if activation_dtype(types[1], cpu) == torch.float32}


def pack(
    weight: torch.Tensor, dtype: torch.dtype, pages: HugePages, compute_dtype: torch.dtype = torch.float32
) -> PackedWeight:
    """A plain weight as the engine stores it."""
    num_rows, in_features = weight.shape
    packed = PackedWeight.empty(num_rows, in_features, dtype, weight.device, compute_dtype, pages)
    packed.copy_rows(0, weight)
    return packed


def random_codes(
    shape: Shape, code_type: CodeType, pages: HugePages, compute_dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """A symmetric weight as the engine stores it."""
    out_features, in_features = shape
    group_size = min(GROUP_SIZE, in_features)
    may_round = compute_dtype == torch.bfloat16
    weight = QuantizedWeight(
        *shape, code_type, group_size, torch.bfloat16, torch.device("cpu"), may_round=may_round, pages=pages
    )
    is_float = code_type is CodeType.FP8
    # Float codes below 16 only: every one of them is a number.
    codes = torch.randint(1 << (4 if is_float else code_type.bits), shape, dtype=torch.uint8)
    scales = torch.full((out_features, weight.num_groups), 2.0**-10)
    zeros = None if is_float else torch.full(scales.shape, 1 << (code_type.bits - 1), dtype=torch.uint8)
    weight.copy_rows(0, codes, scales, zeros)
    return weight


def weights_of(workload: Workload) -> dict[str, tuple[int, torch.dtype]]:
    """Bytes of all weights, and the type of their products, by name."""
    num_scales = sum(o * -(-i // min(GROUP_SIZE, i)) for o, i in workload.shapes)
    floats = {name: (workload.num_weights * dtype.itemsize, compute) for name, (dtype, compute) in formats().items()}
    codes = {
        name: (workload.num_weights * code_type.bits // 8 + 2 * num_scales, compute)
        for name, (code_type, compute) in CODE_FORMATS.items()
    }
    return floats | codes


def bench(workload: Workload, rounds: int) -> list[Result]:
    """Contestants and limits of one workload, measured together."""
    yardsticks = {str(dtype): Yardsticks("cpu", dtype) for dtype in (torch.float32, torch.bfloat16)}
    limiting = {f"{step} {dtype}": run for dtype, each in yardsticks.items() for step, run in each.steps.items()}
    with torch.inference_mode():
        times = measure(contestants(workload) | limiting, Clock("cpu"), rounds)
    limits = {
        dtype: each.limits({step: times[f"{step} {dtype}"] for step in each.steps})
        for dtype, each in yardsticks.items()
    }
    return [
        Result(
            workload.name,
            name,
            num_bytes,
            workload.num_flops,
            times[name],
            times["torch_linear"],
            times["onednn"],
            limit=limits[str(compute_dtype)].seconds(num_bytes, workload.num_flops),
        )
        for name, (num_bytes, compute_dtype) in weights_of(workload).items()
    ]


def bench_all(workloads: list[Workload], rounds: int, console: Console) -> Iterator[Result]:
    """One workload after another, with a progress bar."""
    with Progress(console=console) as progress:
        for workload in progress.track(workloads, description="measuring"):
            yield from bench(workload, rounds)


def print_results(results: list[Result], title: str, console: Console) -> None:
    """One row a workload and type."""
    columns = ("weights", "ms", "MB", "GFLOP", "limit ms", "over limit", "F.linear", "oneDNN")
    table = Table(Column("workload", no_wrap=True), *columns, title=title)
    for r in results:
        table.add_row(
            r.workload,
            r.weights,
            f"{r.ours * 1e3:.2f}",
            f"{r.num_bytes / 1e6:.0f}",
            f"{r.num_flops / 1e9:.2f}",
            f"{r.limit * 1e3:.2f}",
            f"{r.over_limit:.2f}x",
            f"{r.torch_linear / r.ours:.1f}x",
            f"{r.onednn / r.ours:.1f}x",
        )
    console.print(table)


def write_results(results: list[Result], title: str, output: Path) -> None:
    """`linears.csv` and `linears.png` in a folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    output.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) | {"over_limit": result.over_limit} for result in results]
    with (output / "linears.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.5 * len(results)))
    places = range(len(results))
    for offset, name in ((-0.3, "ours"), (-0.1, "onednn"), (0.1, "torch_linear"), (0.3, "limit")):
        axes.barh([p + offset for p in places], [getattr(r, name) * 1e3 for r in results], 0.2, label=name)
    labels = [f"{r.workload}, {r.weights}" for r in results]
    axes.set(yticks=list(places), yticklabels=labels, xscale="log", xlabel="ms", title=title)
    axes.invert_yaxis()
    axes.legend()
    figure.tight_layout()
    figure.savefig(output / "linears.png", dpi=150)


def main(
    output: Annotated[Path, typer.Option(help="Folder for linears.csv and linears.png.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(help="Times each contestant runs.")] = 11,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    rows: Annotated[list[int], typer.Option(help="Rows of a decode step; repeat it.")] = list(DECODE_ROWS),  # noqa: B006
    shapes: Annotated[bool, typer.Option("--shapes", help="Also every shape alone, and the 1B model's.")] = False,
) -> None:
    """Measure the packed linears."""
    console = Console()
    if threads:
        torch.set_num_threads(threads)
    workloads = step_workloads(DEFAULT_MODEL, rows) + prompt_workloads(DEFAULT_MODEL)
    if shapes:
        workloads += [w for model in (DEFAULT_MODEL, ONE_BILLION) for w in shape_workloads(model, rows)]
    title = cpu_title()
    results = list(bench_all(workloads, rounds, console))
    print_results(results, title, console)
    write_results(results, title, output)
    console.print(f"Wrote {output}/linears.csv and {output}/linears.png")
