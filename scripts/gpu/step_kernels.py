"""The kernels of a decode step, by a trace of its graph: what each takes, how it fills the GPU, and what it moves.

`scripts/gpu_report --parts kernels_of_a_step` measures the sizes of the goals, and
`gpu.report.run_part("kernels_of_a_step", seconds, is_dry, log)` is the same for another script. With a workbench of
its own, a script calls `kernels_of_a_step`.

The times of a trace add up: those of all kernels, less what ran at once, and the gaps are the time from the first
kernel's start to the last one's end. The trace itself may slow a step down, so this time stands beside the step by the
clock, without a trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from triton.runtime.interpreter import GridExecutor

from benchmarks.lora_workloads import Step
from benchmarks.machine_limits import Clock, Limits
from gpu.machine import Machine, Row
from gpu.model_steps import RANK, Workbench
from multilora_kernels import step_segments
from multilora_kernels.adapter_codes import CODE_BITS
from multilora_kernels.segments import ROWS

_REPLAYS = 5

_MOST_DEVIATION = 0.03
"""Of a trace from the clock: a larger one is named in the row."""

_WARP, _MOST_PROGRAMS, _REGISTERS = 32, 32, 1 << 16
"""Threads of a warp; programs and registers of a multiprocessor, as of every one from sm_50 on."""

_NAME_LENGTH = 70
_KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
_OPERATORS = {"cpu_op", "user_annotation"}
"""Categories of a trace's events: on a GPU, and in a dry run."""


@dataclass(frozen=True)
class Launch:
    """A kernel, copy or fill as it ran. start, time: in microseconds. programs: of its grid. registers: of a thread.

    What a trace does not tell is 0.
    """

    name: str
    start: float
    time: float
    programs: int = 0
    threads: int = 0
    registers: int = 0
    shared_bytes: int = 0

    @property
    def end(self) -> float:
        return self.start + self.time


@dataclass(frozen=True)
class Work:
    """Kernels of one kind in a step, in the order of their launches.

    family: whose sum is a row of its own. pattern: of their names. launches: place and bytes of each.
    """

    family: str
    pattern: str
    launches: Sequence[tuple[str, float]]


def work_of_a_step(bench: Workbench, num_sequences: int, num_adapters: int) -> list[Work]:
    """The one table of what kernels move: bytes that must be read or written once, by shapes.

    What a library adds to a product, such as the sum of its splits, has none.
    """
    config, size = bench.config, bench.itemsize
    rows, layers = num_sequences, config.num_layers
    hidden, q, kv, ffn = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    # Name, inputs, outputs and slices of the four linears of a layer.
    linears = [
        ("qkv", hidden, q + 2 * kv, 3),
        ("o", q, hidden, 1),
        ("gate_up", hidden, 2 * ffn, 2),
        ("down", ffn, hidden, 1),
    ]
    dtype = bench.tables.arena.dtype
    of_rank = num_adapters * RANK * CODE_BITS.get(dtype, 8 * dtype.itemsize) / 8
    v = 4 * rows * RANK
    products, shrinks, expands, updates = [], [], [], []
    mapping = torch.zeros(rows, dtype=torch.int64, device=bench.device)
    is_activated = num_adapters > 0 and step_segments(mapping, bench.tables, has_prompts=False).chunk_size == ROWS
    for name, inputs, outputs, slices in linears:
        x, y = size * rows * inputs, size * rows * outputs
        a, b = of_rank * inputs * slices, of_rank * outputs
        products.append((name, size * inputs * outputs + x + y))
        shrinks.append((name, a + x + v * slices))
        # The activations, half as many as gates and ups, are written in their place.
        expands.append((name, b + v * slices + y * (1.5 if is_activated and name == "gate_up" else 2)))
        updates.append((name, a + b + x + 2 * y))
    head = ("head", size * (hidden * config.vocab_size + rows * (hidden + config.vocab_size)))
    keys_and_values = 2 * rows * bench.sizes.context * kv * size
    attention = ("attention", keys_and_values + size * rows * (2 * q + 2 * kv))
    # x and the sum of all layers before are read, the sum and the normed x written.
    norm = ("norm", 4 * size * rows * hidden)
    activation = ("activation", 3 * size * rows * ffn)
    return [
        Work("linears", r"splitK", []),
        Work("linears", r"nvjet|gemm|gemv|cutlass|xmma|aten::linear", products * layers + [head]),
        Work("adapters", r"shrink\w*_kernel", shrinks * layers),
        Work("adapters", r"expand\w*_kernel", expands * layers),
        Work("adapters", r"^update\w*_kernel", updates * layers),
        Work("attention", r"decode\w*_kernel", [attention] * layers),
        Work("rest", r"norm_kernel", [norm] * (2 * layers + 1)),
        Work("rest", r"^activation_kernel", [] if is_activated else [activation] * layers),
        Work("rest", r"segment_kernel", [("lists of rows", 16 * rows)]),
    ]


def kernels_of_a_step(
    bench: Workbench, num_sequences: int, num_adapters: int, machine: Machine, limits: Limits
) -> Iterator[Row]:
    """The rows of a decode step of so many sequences, sequence s with adapter s % num_adapters, or none for 0.

    A row each for: the step by the clock, on a GPU of its graph; each kernel at each place, with its launches,
    registers, waves, bytes and bandwidth; each family of kernels; the gaps between kernels; and their sum, which says
    by how much the trace deviates from the clock. A kernel of which `work_of_a_step` has no bytes is there without.
    """
    step = bench.decode(num_sequences, num_adapters)
    by_clock = machine.measure({"step": step})["step"]
    share = limits.seconds(*bench.decode_work(num_sequences, num_adapters)) / by_clock
    dtype = str(bench.tables.arena.dtype).removeprefix("torch.")
    name = f"{num_sequences} rows, {num_adapters} adapters{f' in {dtype}' if num_adapters else ''}"
    yield Row(f"{name}: step", by_clock * 1e6, "us", share, "by the clock")
    launches, fault = trace(step, machine)
    if fault:
        yield Row(f"{name}: trace", note=fault)
    if not launches:
        return
    work = work_of_a_step(bench, num_sequences, num_adapters)
    for row in rows_of_a_trace(launches, work, limits, _Processors.of(machine), by_clock * 1e6):
        yield dataclasses.replace(row, what=f"{name}: {row.what}")


def rows_of_a_trace(
    launches: Sequence[Launch], work: Sequence[Work], limits: Limits, processors: _Processors | None, by_clock: float
) -> list[Row]:
    """launches: of one step, in the order of their starts. by_clock: microseconds of the step without a trace."""
    groups = grouped(launches, work)
    rows = [_row_of_group(group, limits, processors) for group in groups]
    for family in dict.fromkeys(each.family for each in work):
        members = [group for group in groups if group.family == family]
        if members:
            row = Row(f"all of {family}", sum(group.time for group in members), "us")
            rows.append(_with_bytes(row, sum(group.num_bytes for group in members), limits))
    took = max(launch.end for launch in launches) - launches[0].start
    busy, at_once = _busy(launches)
    gaps = f"{1 - busy / took:.1%} of the step; by the clock {by_clock - busy:,.1f} us"
    rows.append(Row("gaps between kernels", took - busy, "us", note=gaps))
    if at_once:
        rows.append(Row("less what ran at once", -at_once, "us"))
    deviation = took / by_clock - 1
    is_changed = "" if abs(deviation) <= _MOST_DEVIATION else ": the trace changes the step, trust the clock"
    rows.append(Row("sum of kernels and gaps", took, "us", note=f"{deviation:+.1%} to the clock{is_changed}"))
    return rows


@dataclass
class Group:
    """The launches of one kernel at one place. num_bytes: of all together, 0 where `Work` tells none."""

    family: str
    place: str
    launches: list[Launch] = field(default_factory=list)
    num_bytes: float = 0.0

    @property
    def time(self) -> float:
        """In microseconds."""
        return sum(launch.time for launch in self.launches)


def grouped(launches: Sequence[Launch], work: Sequence[Work]) -> list[Group]:
    """By kernel and place, those that take longest first.

    Where a kind of kernel has another number of launches than its work says, its bytes are those of all of its kernels,
    and no place is known.
    """
    groups: dict[tuple[str, str], Group] = {}
    unknown = list(launches)
    for each in work:
        is_mine = [re.search(each.pattern, launch.name) is not None for launch in unknown]
        mine = list(itertools.compress(unknown, is_mine))
        unknown = [launch for launch, is_its in zip(unknown, is_mine, strict=True) if not is_its]
        is_in_order = len(mine) == len(each.launches)
        time, total = sum(launch.time for launch in mine), sum(num_bytes for _, num_bytes in each.launches)
        for number, launch in enumerate(mine):
            # By time: a guess between kernels of one kind, and right for all of them together.
            guess = (f"some of {each.family}", total * launch.time / max(time, 1e-9))
            place, num_bytes = each.launches[number] if is_in_order else guess
            group = groups.setdefault((launch.name, place), Group(each.family, place))
            group.launches.append(launch)
            group.num_bytes += num_bytes
    for launch in unknown:
        groups.setdefault((launch.name, ""), Group("", "")).launches.append(launch)
    return sorted(groups.values(), key=lambda group: -group.time)


def _row_of_group(group: Group, limits: Limits, processors: _Processors | None) -> Row:
    first = group.launches[0]
    note = [f"{len(group.launches)} launches"]
    if first.registers:
        note.append(f"{first.registers} registers")
    if processors and first.programs:
        note.append(f"{first.programs:,} programs in {processors.waves(first):.1f} waves")
    name = first.name if len(first.name) <= _NAME_LENGTH else f"{first.name[:_NAME_LENGTH]}..."
    row = Row(f"{group.place}, {name}" if group.place else name, group.time, "us", note=", ".join(note))
    return _with_bytes(row, group.num_bytes, limits)


def _with_bytes(row: Row, num_bytes: float, limits: Limits) -> Row:
    """row: in microseconds."""
    if not num_bytes or not row.value:
        return dataclasses.replace(row, note=", ".join(filter(None, (row.note, "its bytes are not known"))))
    seconds = row.value * 1e-6
    told = f"{num_bytes / 1e6:,.1f} MB, {num_bytes / seconds / 1e12:.2f} TB/s"
    share = limits.seconds(num_bytes, 0) / seconds
    return dataclasses.replace(row, of_limit=share, note=", ".join(filter(None, (row.note, told))))


def _busy(launches: Sequence[Launch]) -> tuple[float, float]:
    """Microseconds in which any kernel ran, and those by which the kernels' own times are more."""
    busy, end = 0.0, launches[0].start
    for launch in launches:
        busy += max(0.0, launch.end - max(launch.start, end))
        end = max(end, launch.end)
    at_once = sum(launch.time for launch in launches) - busy
    return busy, at_once if at_once > 1e-6 * busy else 0.0


@dataclass(frozen=True)
class _Processors:
    """What the multiprocessors of a GPU hold: each so many registers, threads, and bytes of shared memory."""

    count: int
    registers: int
    threads: int
    shared_bytes: int

    @classmethod
    def of(cls, machine: Machine) -> _Processors | None:
        """None in a dry run."""
        if machine.is_dry:
            return None
        found = torch.cuda.get_device_properties(0)
        return cls(
            found.multi_processor_count,
            _REGISTERS,
            found.max_threads_per_multi_processor,
            found.shared_memory_per_multiprocessor,
        )

    def waves(self, launch: Launch) -> float:
        """The programs of a launch over those that all processors hold at once."""
        # A warp gets registers by 256, a program of its own 1 KiB of shared memory beside what it asks for.
        registers = -(-launch.registers * _WARP // 256) * 256 * -(-launch.threads // _WARP)
        fit = [_MOST_PROGRAMS, self.threads // launch.threads, self.shared_bytes // (launch.shared_bytes + 1024)]
        if registers:
            fit.append(self.registers // registers)
        return launch.programs / (self.count * max(1, min(fit)))


def trace(step: Step, machine: Machine) -> tuple[list[Launch], str]:
    """The launches of one run of a step, in the order of their starts: on a GPU of the replay that took the median.

    And what is wrong with them, if anything: where the replays of a graph are not whole in the trace, the step is
    launched kernel by kernel.
    """
    if machine.is_dry:
        return _traced(step, 1, ProfilerActivity.CPU), ""
    # The first trace of a process starts the library that traces: that is to be done before a graph is captured.
    _traced(step, 1, ProfilerActivity.CUDA)
    launches = _traced(Clock("cuda").prepare(step), _REPLAYS, ProfilerActivity.CUDA)
    replays = divided(launches, _REPLAYS)
    if replays:
        return sorted(replays, key=lambda each: max(launch.end for launch in each) - each[0].start)[_REPLAYS // 2], ""
    fault = f"it has {len(launches)} kernels of {_REPLAYS} replays; here the step is launched kernel by kernel"
    return _traced(step, 1, ProfilerActivity.CUDA), fault


def divided(launches: Sequence[Launch], times: int) -> list[list[Launch]]:
    """The launches of each of so many runs of the same work; none where they are not of whole runs."""
    count, rest = divmod(len(launches), times)
    runs = [list(launches[number * count : (number + 1) * count]) for number in range(times)]
    names = [sorted(launch.name for launch in run) for run in runs]
    return [] if rest or not count or any(each != names[0] for each in names) else runs


def _traced(step: Step, times: int, activity: ProfilerActivity) -> list[Launch]:
    is_dry = activity is ProfilerActivity.CPU
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with _named_kernels() if is_dry else contextlib.nullcontext(), profile(activities=[activity]) as profiler:
            for _ in range(times):
                step()
                if not is_dry:
                    torch.cuda.synchronize()
        profiler.export_chrome_trace(str(file))
        content = json.loads(file.read_text())
    return _outermost(read_trace(content, _OPERATORS)) if is_dry else read_trace(content, _KERNELS)


def read_trace(content: Mapping[str, Any], categories: Container[str]) -> list[Launch]:
    """The events of some categories of a trace in Chrome's format, in the order of their starts."""
    events = [event for event in content["traceEvents"] if event.get("ph") == "X" and event.get("cat") in categories]
    return [_launch_of(event) for event in sorted(events, key=lambda event: (event["ts"], -event["dur"]))]


def _outermost(launches: Sequence[Launch]) -> list[Launch]:
    """Without operators inside other operators."""
    outer: list[Launch] = []
    for launch in launches:
        if not outer or launch.start >= outer[-1].end:
            outer.append(launch)
    return outer


def _launch_of(event: Mapping[str, Any]) -> Launch:
    told = event.get("args", {})
    return Launch(
        event["name"],
        float(event["ts"]),
        float(event["dur"]),
        math.prod(told.get("grid", [0])),
        math.prod(told.get("block", [0])),
        told.get("registers per thread", 0),
        told.get("shared memory", 0),
    )


@contextlib.contextmanager
def _named_kernels() -> Iterator[None]:
    """Kernels in Triton's interpreter are in traces by their names."""
    call = GridExecutor.__call__

    def named(executor: Any, *arguments: Any, **options: Any) -> None:
        with record_function(executor.fn.__name__):
            call(executor, *arguments, **options)

    GridExecutor.__call__ = named
    try:
        yield
    finally:
        GridExecutor.__call__ = call
