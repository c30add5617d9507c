"""A row of the GPU's report, and the machine that it is about."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.lora_workloads import Step
from benchmarks.machine_limits import Clock, EagerClock, Limits, Yardsticks, measure


@dataclass(frozen=True)
class Row:
    """One figure. value: None where the note says all. of_limit: the share of the limit that it reaches."""

    what: str
    value: float | None = None
    unit: str = ""
    of_limit: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Machine:
    """What is measured: the GPU, or in a dry run the interpreter, with tiny shapes and one round.

    process, num_processes: this one's place among those that share the work of a part.
    """

    is_dry: bool
    process: int = 0
    num_processes: int = 1

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_dry else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def rounds(self) -> int:
        return 1 if self.is_dry else 15

    def measure(self, steps: dict[str, Step], *, is_eager: bool = False) -> dict[str, float]:
        """Median seconds of each; on a GPU of its CUDA graph, unless they are launched kernel by kernel."""
        clock = EagerClock(self.device.type) if is_eager else Clock(self.device.type)
        return measure(steps, clock, self.rounds)

    def limits(self) -> Limits:
        if self.is_dry:
            return Limits(1e9, 1e9)
        yardsticks = Yardsticks("cuda", self.dtype)
        return yardsticks.limits(self.measure(yardsticks.steps))
