"""The limits of the machine, and the clock that measures it as it measures all else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.lora_workloads import Step
from benchmarks.plain_loops import DOT_ROUNDS, PlainLoops


@dataclass(frozen=True)
class Limits:
    """Measured in this run: bytes per second and floating-point operations per second."""

    bandwidth: float
    peak: float

    def seconds(self, num_bytes: float, num_flops: float) -> float:
        """The least seconds that moving so many bytes and so many operations can take."""
        return max(num_bytes / self.bandwidth, num_flops / self.peak)


class Clock:
    """Times a step; on a GPU captured once as a CUDA graph and replayed."""

    def __init__(self, device: str) -> None:
        self.device = device

    def prepare(self, step: Step) -> Step:
        """The function to time: the step itself, or the replay of its graph."""
        step()
        if self.device == "cpu":
            return step
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def seconds(self, prepared: Step) -> float:
        """The seconds of one run."""
        self._wait()
        start = time.perf_counter()
        prepared()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


class EagerClock(Clock):
    """Times a step as it is, kernel by kernel."""

    def prepare(self, step: Step) -> Step:
        """Run a step once ahead, which compiles the kernels that are not compiled yet."""
        step()
        return step


def measure(steps: dict[str, Step], clock: Clock, rounds: int) -> dict[str, float]:
    """Median seconds of each step, all of them once a round."""
    return {name: statistics.median(values) for name, values in measure_all(steps, clock, rounds).items()}


def measure_all(steps: dict[str, Step], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round, in which they run in their order."""
    prepared = {name: clock.prepare(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in prepared.items():
            times[name].append(clock.seconds(step))
    return times


class Yardsticks:
    """Steps that only move memory or only multiply numbers of one type, to be timed beside the work that they limit.

    A CPU multiplies through oneDNN (the MKL behind torch's `@` reaches half of its speed on AMD's processors) and in
    plain loops. The fastest step of a kind is the limit.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        numel, n = (1 << 25, 1024) if device == "cpu" else (1 << 28, 8192)
        source = torch.ones(numel, device=device)
        target = torch.empty_like(source)
        matrix = torch.randn(n, n, device=device, dtype=dtype)
        multiply = onednn_linear if device == "cpu" and has_onednn(dtype) else torch.matmul
        self.steps: dict[str, Step] = {
            "copy": lambda: void(target.copy_(source)),
            "read": lambda: void(source.sum()),
            "multiply": lambda: void(multiply(matrix, matrix)),
        }
        self._bytes = {"copy": 2.0 * source.nbytes, "read": float(source.nbytes)}
        self._flops = {"multiply": 2.0 * n**3}
        if device == "cpu":
            self._add_plain_loops(source, dtype)

    def limits(self, seconds: Mapping[str, float]) -> Limits:
        """The limits of the machine, by the seconds that each step took."""
        bandwidth = max(num_bytes / seconds[name] for name, num_bytes in self._bytes.items())
        return Limits(bandwidth, max(num_flops / seconds[name] for name, num_flops in self._flops.items()))

    def _add_plain_loops(self, source: torch.Tensor, dtype: torch.dtype) -> None:
        loops = PlainLoops()
        self.steps["load"] = lambda: void(loops.load(source))
        self._bytes["load"] = float(source.nbytes)
        if operations := loops.operations(dtype):
            self.steps["dot"] = lambda: void(loops.multiply(dtype, DOT_ROUNDS))
            self._flops["dot"] = float(operations * DOT_ROUNDS * torch.get_num_threads())


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies numbers of this type here: bfloat16 takes AVX-512."""
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T by oneDNN. weight: plain, or as `torch.ops.mkldnn._reorder_linear_weight` packed it for some rows."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def void(_: object) -> None:
    """Drops a result."""


def seconds_of(task: Callable[[], object]) -> float:
    """The seconds that a task takes."""
    started = time.perf_counter()
    task()
    return time.perf_counter() - started
