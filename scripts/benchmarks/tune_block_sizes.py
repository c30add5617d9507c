"""Measure the tile sizes of the GPU kernels on this GPU and write the best into `cuda/block_sizes.json`.

Operators and regimes are tuned one by one, each over the workloads that the entry of the table serves; then the update
of decode steps for each rank and width by itself, for fewer rows (`plans`), and beside a shrink and an expand in its
place. A candidate that does not fit the GPU's shared memory is left out.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import track

from benchmarks.gpu_operators import expand_all, shrink_all, update_all
from benchmarks.lora_workloads import Batch, Model, Workload
from benchmarks.model_shapes import EIGHT_BILLION
from benchmarks.synthetic_batches import LinearShape
from multilora_kernels.cuda.block_sizes import TABLE_PATH, BlockSizes, architecture, capability

WORKLOADS = {
    "decode": [Workload(EIGHT_BILLION, 64, 64, (16,)), Workload(EIGHT_BILLION, 256, 1, (64,))],
    "prefill": [Workload(EIGHT_BILLION, 8192, 4, (64,))],
}
CHOICES: dict[str, dict[str, list[int]]] = {
    "shrink": {"BLOCK_K": [64, 128, 256], "BLOCK_R": [16, 32, 64], "num_warps": [4, 8], "num_stages": [2, 3, 4]},
    "expand": {"BLOCK_N": [64, 128, 256, 512], "BLOCK_R": [16, 32, 64], "num_warps": [4, 8], "num_stages": [1, 2, 3]},
    # One tile has all ranks that this kernel serves.
    "update": {
        "BLOCK_K": [128, 256, 512],
        "BLOCK_N": [64, 128, 256],
        "BLOCK_R": [64],
        "num_warps": [4, 8],
        "num_stages": [2, 3, 4],
    },
}

_COLD_BYTES = 256 << 20
"""Several times what caches hold."""

PLAN_RANKS, PLAN_ROWS = (16, 64), (8, 64)
"""The largest ranks and rows of plans. More rows than the last have its sizes."""


def regimes(operator: str) -> list[str]:
    """Prompts have no update in one launch."""
    return ["decode"] if operator == "update" else list(WORKLOADS)


def candidates(operator: str) -> Iterator[BlockSizes]:
    """Every combination of the choices."""
    names = CHOICES[operator]
    for values in itertools.product(*names.values()):
        yield dict(zip(names, values, strict=True))


def steps(operator: str, regime: str) -> list[Callable[[BlockSizes], object]]:
    """One function of the tile sizes for each workload of a regime."""
    batches = [Batch(workload, torch.bfloat16, torch.bfloat16, "cuda") for workload in WORKLOADS[regime]]
    if operator == "update":
        return [functools.partial(update_all, batch) for batch in batches]
    if operator == "shrink":
        return [functools.partial(shrink_all, batch) for batch in batches]
    return [functools.partial(expand_all, batch, shrink_all(batch)) for batch in batches]


def milliseconds(workloads: list[Callable[[BlockSizes], object]], sizes: BlockSizes) -> float:
    """The milliseconds of all workloads together; infinite where the tiles are too large for the GPU."""
    try:
        return math.fsum(triton.testing.do_bench_cudagraph(functools.partial(step, sizes)) for step in workloads)
    except triton.runtime.errors.OutOfResources:
        return float("inf")


def tune(operator: str, regime: str, console: Console) -> BlockSizes:
    """The fastest candidate."""
    workloads = steps(operator, regime)
    tried = track(list(candidates(operator)), description=f"{operator} {regime}", console=console)
    times = [(milliseconds(workloads, sizes), sizes) for sizes in tried]
    best_time, best = min(times, key=lambda entry: entry[0])
    console.print(f"{operator} {regime}: {best_time:.3f} ms with {best}")
    return best


def tune_plans(
    entry: BlockSizes,
    cost: Callable[[LinearShape, int, int, BlockSizes], float],
    cost_of_two: Callable[[LinearShape, int, int], float],
) -> list[dict[str, Any]]:
    """Plans of the update of decode steps, the narrowest and those of the smallest rank first.

    entry: of the table, which a plan changes. cost: of a linear, a rank, a number of rows and sizes, in any unit.
    cost_of_two: of a shrink and an expand in the place of an update.
    """
    plans = []
    linears = {linear.in_features: linear for linear in EIGHT_BILLION.linears}
    for rank, (width, linear) in itertools.product(PLAN_RANKS, sorted(linears.items())):
        tried = [entry | sizes for sizes in candidates("update")]
        costs = [cost(linear, rank, PLAN_ROWS[-1], sizes) for sizes in tried]
        best = tried[costs.index(min(costs))]
        by_rows, of_one = [], min(costs)
        for num_rows in PLAN_ROWS[:-1]:
            alike = [sizes for sizes in tried if sizes["BLOCK_K"] == best["BLOCK_K"]]
            of_rows = min(alike, key=lambda sizes: cost(linear, rank, num_rows, sizes))
            of_one += cost(linear, rank, num_rows, of_rows)
            if changed := _changes(of_rows, best):
                by_rows.append({"max_rows": num_rows, "sizes": changed})
        # Many rows wait for memory, few for one load after the other.
        is_two = math.fsum(cost_of_two(linear, rank, num_rows) for num_rows in PLAN_ROWS) < of_one
        if (changed := _changes(best, entry)) or by_rows or is_two:
            plan = {"max_rank": rank, "max_width": width, "sizes": changed, "by_rows": by_rows}
            plans.append(plan | ({"num_launches": 2} if is_two else {}))
    return plans


def _changes(sizes: BlockSizes, others: BlockSizes) -> BlockSizes:
    return {name: size for name, size in sizes.items() if others.get(name) != size}


def update_milliseconds(linear: LinearShape, rank: int, num_rows: int, sizes: BlockSizes) -> float:
    """Of a layer of a step whose rows have an adapter each."""
    batch = _cold_batch(linear, rank, num_rows)
    return milliseconds([functools.partial(update_all, batch)], sizes) / batch.workload.model.num_layers


def two_launches_milliseconds(
    shrink_sizes: BlockSizes, expand_sizes: BlockSizes, linear: LinearShape, rank: int, num_rows: int
) -> float:
    """The same of a shrink and an expand."""
    batch = _cold_batch(linear, rank, num_rows)
    v = shrink_all(batch)
    shrink, expand = functools.partial(shrink_all, batch), functools.partial(expand_all, batch, v)
    total = milliseconds([shrink], shrink_sizes) + milliseconds([expand], expand_sizes)
    return total / batch.workload.model.num_layers


def _cold_batch(linear: LinearShape, rank: int, num_rows: int) -> Batch:
    model = Model("one linear", (linear,), cold_layers(linear, rank, num_rows))
    return Batch(Workload(model, num_rows, num_rows, (rank,)), torch.bfloat16, torch.bfloat16, "cuda")


def cold_layers(linear: LinearShape, rank: int, num_adapters: int) -> int:
    """Layers of so many adapters that none is in a cache when its turn comes again, as in a model."""
    layer = Workload(Model("one linear", (linear,), 1), num_adapters, num_adapters, (rank,))
    return math.ceil(_COLD_BYTES / layer.adapter_bytes(torch.bfloat16))


def main() -> None:
    """Tune for the GPU of this machine."""
    console = Console()
    name = architecture(capability(torch.device("cuda")))
    best: dict[str, Any] = {op: {regime: tune(op, regime, console) for regime in regimes(op)} for op in CHOICES}
    in_two = functools.partial(two_launches_milliseconds, best["shrink"]["decode"], best["expand"]["decode"])
    best["update"]["decode"]["plans"] = tune_plans(best["update"]["decode"], update_milliseconds, in_two)
    tables = json.loads(TABLE_PATH.read_text()) | {name: best}
    TABLE_PATH.write_text(json.dumps(tables, indent=2) + "\n")
    console.print(f"Wrote the sizes of {name} to {TABLE_PATH}")
