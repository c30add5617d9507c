"""The limits of the machine, and the clock that measures it as it measures all else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.lora_workloads import Step


@dataclass(frozen=True)
class Limits:
    """Measured in this run: bytes per second and floating-point operations per second."""

    bandwidth: float
    peak: float

    def seconds(self, num_bytes: int, num_flops: int) -> float:
        """The least that moving and multiplying so much can take."""
        return max(num_bytes / self.bandwidth, num_flops / self.peak)


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
    return {name: statistics.median(values) for name, values in measure_all(steps, clock, rounds).items()}


def measure_all(steps: dict[str, Step], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round, in which they run in their order."""
    prepared = {name: clock.prepare(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in prepared.items():
            times[name].append(clock.seconds(step))
    return times


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
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def void(_: torch.Tensor) -> None:
    """Drops a result."""


def seconds_of(task: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    task()
    return time.perf_counter() - started
