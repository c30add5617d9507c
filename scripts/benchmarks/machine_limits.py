"""The limits of the machine, and the clock that measures it as it measures all else.

Libraries reach 40 to 90 % of what a processor's instructions allow, by processor and type, so a ratio to their products
alone would say little: on a CPU, loops of nothing else (plain_loops.cpp) load and multiply beside them, and the fastest
is the limit.
"""

from __future__ import annotations

import ctypes
import functools
import math
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.lora_workloads import Step
from multilora_kernels import HugePages

_LEAST_SECONDS, _MOST_COPIES, _MOST_TRIES = 2e-3, 100, 2
"""Of a graph that is timed."""

_SIZE = 512
"""Rows and columns: a product of some milliseconds on one core, at nine tenths or more of its registers' rate."""

CPU_FLOATS, CPU_ROWS = 1 << 27, 1024
"""Half a GiB: caches of a server keep little of it from one time to the next; and rows of a product."""

DOT_ROUNDS = 5_000_000
"""Some ten milliseconds of a core's dot products."""

PAUSES = (0, 2, 4)
"""Multiplications between two lines that a core loads: the number that is quickest depends on the processor."""

_FACTOR = 0.5
"""Accumulators stay near 2: numbers too small for a float32 would be slower."""

_LOOPS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Limits:
    """Measured in this run: bytes per second and floating-point operations per second."""

    bandwidth: float
    peak: float

    def seconds(self, num_bytes: float, num_flops: float) -> float:
        """The least seconds that moving so many bytes and so many operations can take."""
        return max(num_bytes / self.bandwidth, num_flops / self.peak)


class Clock:
    """Times a step; on a GPU captured as a CUDA graph and replayed, by the device's own clock."""

    def __init__(self, device: str) -> None:
        self.device = device

    def prepare(self, step: Step) -> Step:
        """The function to time: the step itself, or the replay of its graph."""
        step()
        return step if self.device == "cpu" else _captured(step, 1).replay

    def timer(self, step: Step) -> Callable[[], float]:
        """A function that runs a step, and gives the seconds of one run."""
        if self.device == "cpu":
            return functools.partial(seconds_of, self.prepare(step))
        step()
        return _DeviceTimer(step).seconds


class EagerClock(Clock):
    """Times a step as it is, kernel by kernel, with what the host takes to launch them."""

    def prepare(self, step: Step) -> Step:
        """Run a step once ahead, which compiles the kernels that are not compiled yet."""
        step()
        return step

    def timer(self, step: Step) -> Callable[[], float]:
        """A function that runs a step, and gives the seconds of one run."""
        prepared = self.prepare(step)

        def seconds() -> float:
            self._wait()
            start = time.perf_counter()
            prepared()
            self._wait()
            return time.perf_counter() - start

        return seconds

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


class _DeviceTimer:
    """Times replays of a step's graph between two events of its stream.

    A launch of a graph takes the host longer than the device takes for a small kernel, and timed by the host, one
    replay after each pause, a copy on an H200 seemed to take twice as long. So the graph has as many copies of the
    step as take `_LEAST_SECONDS`, and is replayed once before the first event.
    """

    def __init__(self, step: Step) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._graph, self._copies = _captured(step, 1), 1
        for _ in range(_MOST_TRIES):
            seconds = self.seconds()
            copies = min(_MOST_COPIES, math.ceil(_LEAST_SECONDS / seconds))
            if copies <= 2 * self._copies:
                break
            self._graph, self._copies = _captured(step, copies), copies

    def seconds(self) -> float:
        """The seconds of one step, the mean over the graph's copies."""
        start, end = self._events
        self._graph.replay()
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / self._copies


def _captured(step: Step, copies: int) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            step()
    return graph


def measure(steps: dict[str, Step], clock: Clock, rounds: int) -> dict[str, float]:
    """Median seconds of each step, all of them once a round."""
    return {name: statistics.median(values) for name, values in measure_all(steps, clock, rounds).items()}


def measure_all(steps: dict[str, Step], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round, in which they run in their order."""
    timers = {name: clock.timer(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer())
    return times


class Yardsticks:
    """Steps that only move memory or only multiply numbers of one type, to be timed beside the work that they limit.

    A CPU multiplies through oneDNN (the MKL of torch's `@` reaches half of its speed on AMD's processors) and in plain
    loops. The fastest step of a kind is the limit. A CPU's step takes some tens of milliseconds: a virtual core that
    slept wakes up in one or two, which are a third of a step of 5 ms.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        numel, n = (CPU_FLOATS, CPU_ROWS) if device == "cpu" else (1 << 28, 8192)
        copies, products = (3, 24) if device == "cpu" else (1, 1)
        source = _memory(numel, device).uniform_()
        target = _memory(numel, device)
        matrix = torch.randn(n, n, device=device, dtype=dtype)
        multiply = onednn_linear if device == "cpu" and has_onednn(dtype) else torch.matmul
        self.steps: dict[str, Step] = {}
        self._bytes: dict[str, float] = {}
        self._flops: dict[str, float] = {}
        self._add("copy", lambda: target.copy_(source), self._bytes, 2.0 * source.nbytes, copies)
        self._add("read", lambda: source.sum(), self._bytes, source.nbytes, copies)
        self._add("multiply", lambda: multiply(matrix, matrix), self._flops, 2.0 * n**3, products)
        if device == "cpu":
            loops = PlainLoops()
            for pause in PAUSES:
                load = functools.partial(loops.load, source, pause)
                self._add(f"load, pauses of {pause}", load, self._bytes, source.nbytes, copies)
            if operations := loops.operations(dtype) * torch.get_num_threads() * DOT_ROUNDS:
                self._add("dot", lambda: loops.multiply(dtype, DOT_ROUNDS), self._flops, operations, copies)

    def limits(self, seconds: Mapping[str, float]) -> Limits:
        """The limits of the machine, by the seconds that each step took."""
        bandwidth = max(num_bytes / seconds[name] for name, num_bytes in self._bytes.items())
        return Limits(bandwidth, max(num_flops / seconds[name] for name, num_flops in self._flops.items()))

    def _add(
        self, name: str, task: Callable[[], object], amounts: dict[str, float], amount: float, copies: int
    ) -> None:
        """A step that does a task, which moves or computes an amount, so many times."""

        def step() -> None:
            for _ in range(copies):
                task()

        self.steps[name], amounts[name] = step, copies * amount


def _memory(numel: int, device: str) -> torch.Tensor:
    """Float32 zeros. On a CPU in huge pages, as the weights are: small ones are read a tenth slower."""
    shape = (numel,)
    return HugePages().zeros(shape, torch.float32) if device == "cpu" else torch.zeros(shape, device=device)


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies numbers of this type here: bfloat16 takes AVX-512."""
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T by oneDNN. weight: plain, or as `torch.ops.mkldnn._reorder_linear_weight` packed it for some rows."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def matrix_rate(seconds: float = 0.03) -> float:
    """Float32 operations a second that all of torch's threads reach together, each with matrix products of its own.

    One product that all threads share waits for the slowest core, and a virtual core gives half its rate for seconds or
    minutes whenever a neighbour uses the other half of the physical one. Here oneDNN multiplies packed weights, and
    every core counts for its own work in the same stretch of time. Where plain loops are faster, their rate counts.
    """
    matrix = torch.randn(_SIZE, _SIZE)
    num_threads = torch.get_num_threads()
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, _SIZE)
    start = threading.Barrier(num_threads)

    def rate() -> float:
        torch.set_num_threads(1)
        with torch.inference_mode():
            onednn_linear(matrix, packed)
            start.wait()
            started, num_products = time.perf_counter(), 0
            while (passed := time.perf_counter() - started) < seconds:
                onednn_linear(matrix, packed)
                num_products += 1
        return num_products * 2 * _SIZE**3 / passed

    with ThreadPoolExecutor(num_threads) as threads:
        rates = [future.result() for future in [threads.submit(rate) for _ in range(num_threads)]]
    torch.set_num_threads(num_threads)
    loops = PlainLoops()
    passed = seconds_of(lambda: loops.multiply(torch.float32, DOT_ROUNDS))
    return max(sum(rates), DOT_ROUNDS * loops.operations(torch.float32) * num_threads / passed)


class PlainLoops:
    """The compiled loops, on as many threads as torch has when they are called."""

    def __init__(self) -> None:
        self._library = _compiled_loops()

    def operations(self, dtype: torch.dtype) -> int:
        """The operations of one round on one core; 0 where the processor has no such instruction."""
        return int(getattr(self._library, f"operations_{_LOOPS[dtype]}")()) if dtype in _LOOPS else 0

    def multiply(self, dtype: torch.dtype, rounds: int) -> list[float]:
        """`rounds` of dot products of `dtype` on each core, from registers. The sum of each core's accumulators."""
        loop = getattr(self._library, f"multiply_{_LOOPS[dtype]}")
        return _on_all_cores(lambda _: loop(ctypes.c_int64(rounds), ctypes.c_float(_FACTOR)))

    def load(self, values: torch.Tensor, pause: int = 0) -> float:
        """The sum of float32 `values`. Each core reads a part, a multiple of 128 numbers.

        pause: between two lines of memory, one of PAUSES.
        """
        parts = values.chunk(torch.get_num_threads())

        def load_part(i: int) -> float:
            place, count = ctypes.c_void_p(parts[i].data_ptr()), ctypes.c_int64(len(parts[i]))
            if pause == 0:
                return float(self._library.load(place, count))
            return float(self._library.load_slowly(place, count, ctypes.c_int64(pause)))

        return sum(_on_all_cores(load_part))


def _on_all_cores(task: Callable[[int], float]) -> list[float]:
    """The task's results. Each thread gets its number, and starts when all are there."""
    num_threads = torch.get_num_threads()
    start = threading.Barrier(num_threads)

    def run(i: int) -> float:
        start.wait()
        return task(i)

    return list(_threads(num_threads).map(run, range(num_threads)))


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)


@functools.cache
def _compiled_loops() -> ctypes.CDLL:
    source = Path(__file__).with_name("plain_loops.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "plain_loops.so"
        flags = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-std=c++17")
        subprocess.run(["c++", *flags, "-o", library, source], check=True)
        loops = ctypes.CDLL(str(library))
    for name in _LOOPS.values():
        getattr(loops, f"operations_{name}").restype = ctypes.c_int64
        getattr(loops, f"multiply_{name}").restype = ctypes.c_double
    loops.load.restype = loops.load_slowly.restype = ctypes.c_double
    return loops


def void(_: object) -> None:
    """Drops a result."""


def seconds_of(task: Callable[[], object]) -> float:
    """The seconds that a task takes."""
    started = time.perf_counter()
    task()
    return time.perf_counter() - started
