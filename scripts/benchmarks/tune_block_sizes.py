"""Measure the tile sizes of the GPU kernels on this GPU and write the best into `cuda/block_sizes.json`.

Operators and regimes are tuned one by one, each over the workloads that the entry of the table serves. A candidate that
does not fit the GPU's shared memory is left out.
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
from benchmarks.lora_workloads import Batch, Workload
from benchmarks.model_shapes import EIGHT_BILLION
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


def main() -> None:
    """Tune for the GPU of this machine."""
    console = Console()
    name = architecture(capability(torch.device("cuda")))
    best: dict[str, Any] = {op: {regime: tune(op, regime, console) for regime in regimes(op)} for op in CHOICES}
    tables = json.loads(TABLE_PATH.read_text()) | {name: best}
    TABLE_PATH.write_text(json.dumps(tables, indent=2) + "\n")
    console.print(f"Wrote the sizes of {name} to {TABLE_PATH}")
