"""The parts of the GPU's report that try tiles: of decode steps for adapters of rank 16, by the inputs of linears; and
those of `attention_tuning`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import triton

from benchmarks.lora_workloads import EIGHT_BILLION, Batch, Model, Step, Workload
from benchmarks.machine_limits import void
from gpu.attention_tuning import launches, tried, tune_attention, why_refused
from gpu.kernel_parts import TINY_MODEL, expand_all, rows_and_tiles, shrink_all
from gpu.machine import Machine, Row
from gpu.report import PLAN
from multilora_kernels import LoRASegments
from multilora_kernels.cuda.block_sizes import BlockSizes, Operator, block_sizes, capability, entry_with_plans
from multilora_kernels.segments import ROWS

_RANK, _ANY_WIDTH = 16, 1 << 20
_ROWS, _DRY_ROWS = (8, 64), (2,)
"""Of the steps that a candidate is timed with, together: many rows wait for memory, few for load after load."""

_BOUNDS, _DRY_BOUNDS = (16, 32, 64, 128, 256), (2,)
"""Numbers of rows, each with an adapter of its own, for which rows by themselves are compared with tiles."""

_COLD_BYTES = 256 << 20
"""Adapters that a step reads, several times what caches hold: as those of a model's layers, none is in one."""

_CHOICES: dict[Operator, dict[str, list[int]]] = {
    "shrink": {"BLOCK_R": [4, 8, 16], "RANK_SPLITS": [1, 2], "num_warps": [2, 4, 8]},
    "expand": {"BLOCK_N": [256, 512, 1024], "num_warps": [2, 4, 8]},
}


@dataclass(frozen=True)
class _Candidate:
    """Tiles of an operator for the linears of one number of inputs."""

    operator: Operator
    width: int
    sizes: BlockSizes


def compile_candidates(machine: Machine) -> Iterator[Row]:
    """Launch each candidate of `tune` once: the compiler keeps its kernels, and `tune` has none to wait for."""
    batches = _batches(machine)
    of_adapters = (functools.partial(_try, candidate, batches) for candidate in _candidates(machine))
    candidates: Iterator[Callable[[], Any]] = itertools.chain(of_adapters, launches(machine))
    num_tried = 0
    for launch in itertools.islice(candidates, machine.process, None, machine.num_processes):
        why_refused(launch)
        num_tried += 1
    yield Row("compiled ahead", num_tried, "sets of tiles")


def tune(machine: Machine) -> Iterator[Row]:
    """The time of each candidate, and after those of an operator its entry for block_sizes.json."""
    batches, gpu = _batches(machine), capability(machine.device)
    times: _Times = {}
    for operator, of_operator in itertools.groupby(_candidates(machine), key=lambda candidate: candidate.operator):
        for candidate in of_operator:
            try:
                seconds = machine.measure({"step": _step(candidate, batches[candidate.width])})["step"]
            except triton.runtime.errors.OutOfResources:
                continue
            sizes = json.dumps(candidate.sizes)
            times.setdefault((operator, candidate.width), {})[sizes] = seconds
            yield Row(f"{operator}, {candidate.width} inputs", seconds * 1e6, "us", note=sizes)
        plans = _PLANS[operator](times, sorted(batches), functools.partial(_table_sizes, machine, operator))
        yield Row(PLAN, note=json.dumps(entry_with_plans(operator, "rows", gpu, plans)))
    yield from _compare_with_tiles(machine)
    yield from tune_attention(machine)


def _compare_with_tiles(machine: Machine) -> Iterator[Row]:
    """Updates of rows by themselves beside those by tiles, each with the table's sizes; then the plan."""
    layer = TINY_MODEL if machine.is_dry else EIGHT_BILLION
    compared: dict[int, tuple[float, float]] = {}
    for num_rows in _DRY_BOUNDS if machine.is_dry else _BOUNDS:
        batch = _batch(layer, num_rows, num_rows, machine)
        by_rows, by_tiles = (functools.partial(_update_all, batch, segments) for segments in rows_and_tiles(batch))
        seconds = machine.measure({"rows": by_rows, "tiles": by_tiles})
        compared[num_rows] = seconds["rows"], seconds["tiles"]
        for name, taken in seconds.items():
            yield Row(f"{num_rows} rows, {batch.workload.model.num_layers} layers, by {name}", taken * 1e6, "us")
    plan = {"max_rank": _RANK, "max_width": _ANY_WIDTH, "sizes": {"max_rows": most_rows(compared)}}
    yield Row(PLAN, note=json.dumps(entry_with_plans("update", "rows", capability(machine.device), [plan])))


def most_rows(compared: Mapping[int, tuple[float, float]]) -> int:
    """The largest number of rows up to which rows by themselves take no longer than tiles, 0 for none.

    compared: by numbers of rows, the seconds of both.
    """
    served = itertools.takewhile(lambda num_rows: compared[num_rows][0] <= compared[num_rows][1], sorted(compared))
    return max(served, default=0)


_Times = dict[tuple[Operator, int], dict[str, float]]
"""Seconds of the candidates of an operator, by their sizes as JSON, for the linears of a number of inputs."""

_TableSizes = Callable[[int], BlockSizes]
"""The table's tiles for a number of inputs."""


def shrink_plans(times: _Times, widths: list[int], table: _TableSizes) -> list[dict[str, Any]]:
    return [_plan(width, _quickest(times["shrink", width]), table(width)) for width in widths]


def expand_plans(times: _Times, widths: list[int], table: _TableSizes) -> list[dict[str, Any]]:
    """One for all: it is looked up by outputs, and linears of a number of inputs have several."""
    return [_plan(_ANY_WIDTH, _expand_sizes(times, widths), table(widths[0]))]


_PLANS = {"shrink": shrink_plans, "expand": expand_plans}


def _expand_sizes(times: _Times, widths: list[int]) -> str:
    """Those with which the linears of all widths take the least time together."""
    by_width = [times["expand", width] for width in widths]
    in_all = set.intersection(*(set(each) for each in by_width))
    return _quickest({sizes: math.fsum(each[sizes] for each in by_width) for sizes in in_all})


def _quickest(seconds: dict[str, float]) -> str:
    return min(seconds, key=lambda sizes: seconds[sizes])


def _plan(width: int, sizes: str, table: BlockSizes) -> dict[str, Any]:
    """For this rank alone: whether a larger one fits beside such tiles, nobody has tried."""
    changed = {name: size for name, size in json.loads(sizes).items() if table.get(name) != size}
    return {"max_rank": _RANK, "max_width": width, "sizes": changed}


def _candidates(machine: Machine) -> Iterator[_Candidate]:
    """The table's tiles first, then all choices; in a dry run the table's alone."""
    for operator, choices in _CHOICES.items():
        for width in _linears(machine):
            table = _table_sizes(machine, operator, width)
            for sizes in [table, *([] if machine.is_dry else tried(table, choices))]:
                yield _Candidate(operator, width, sizes)


def _table_sizes(machine: Machine, operator: Operator, width: int) -> BlockSizes:
    return block_sizes(operator, ROWS, _RANK, capability(machine.device), width, max(_ROWS))


def _linears(machine: Machine) -> dict[int, Model]:
    """By number of inputs, the linears that have it, in one layer."""
    model = TINY_MODEL if machine.is_dry else EIGHT_BILLION
    widths = sorted({linear.in_features for linear in model.linears})
    return {n: Model(f"{n} inputs", tuple(x for x in model.linears if x.in_features == n), 1) for n in widths}


def _batches(machine: Machine) -> dict[int, list[Batch]]:
    """Decode steps in which each row has an adapter of its own, by the inputs of their linears."""
    all_rows = _DRY_ROWS if machine.is_dry else _ROWS
    return {
        width: [_batch(layer, rows, max(all_rows), machine) for rows in all_rows]
        for width, layer in _linears(machine).items()
    }


def _batch(layer: Model, num_rows: int, cold_rows: int, machine: Machine) -> Batch:
    """Of as many layers as so many adapters need to leave the cache; each row has one of its own."""
    bytes_of_layer = Workload(layer, cold_rows, cold_rows, (_RANK,)).adapter_bytes(machine.dtype)
    num_layers = 1 if machine.is_dry else -(-_COLD_BYTES // bytes_of_layer)
    model = Model(layer.name, layer.linears, num_layers)
    workload = Workload(model, num_rows, num_rows, (_RANK,))
    return Batch(workload, machine.dtype, machine.dtype, machine.device.type)


def _update_all(batch: Batch, segments: LoRASegments) -> None:
    expand_all(batch, shrink_all(batch, segments=segments), segments=segments)


def _try(candidate: _Candidate, batches: dict[int, list[Batch]]) -> None:
    _step(candidate, batches[candidate.width])()


def _step(candidate: _Candidate, batches: list[Batch]) -> Step:
    steps = [_step_of(candidate, batch) for batch in batches]

    def step() -> None:
        for each in steps:
            each()

    return step


def _step_of(candidate: _Candidate, batch: Batch) -> Step:
    if candidate.operator == "shrink":
        return lambda: void(shrink_all(batch, candidate.sizes))
    return functools.partial(expand_all, batch, shrink_all(batch), candidate.sizes)
