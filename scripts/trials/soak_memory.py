"""Tells whether processes' memory grows, by a straight line of least squares, with its error from the deviations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

SHARED_MEMORY = "/dev/shm"
SHORTEST_JUDGED_S = 1800.0
"""CPython's free lists fill for a quarter of an hour, also in a process that has nothing to do: half of a stretch is
left out, and in a shorter stretch their memory would count as growth.
"""

_NUM_STANDARD_ERRORS = 3
_NEGLIGIBLE_SLOPE = 1.0
_NEGLIGIBLE_SHARE = 0.01
"""MiB an hour, and share of its size: memory that grows by less than the larger is flat, however small its error."""

_WARM_UP_SHARE = 0.5


@dataclass(frozen=True)
class Line:
    """A straight line through bytes over seconds. first, last: MiB; slope, error: MiB an hour, its standard error."""

    first: float
    last: float
    slope: float
    error: float

    @property
    def grows(self) -> bool:
        negligible = max(_NEGLIGIBLE_SLOPE, _NEGLIGIBLE_SHARE * self.first)
        return self.slope > max(_NUM_STANDARD_ERRORS * self.error, negligible)


@dataclass(frozen=True)
class Stretch:
    """The time between two starts of a server: bytes of each process, and of /dev/shm, at `seconds` of the soak."""

    seconds: list[float] = field(default_factory=list)
    num_bytes: dict[str, list[int]] = field(default_factory=dict)

    def add(self, now: float, sizes: Mapping[str, int]) -> None:
        self.seconds.append(now)
        for name, size in sizes.items():
            self.num_bytes.setdefault(name, []).append(size)

    @property
    def is_judged(self) -> bool:
        """Whether the stretch is long enough to tell growth from a start."""
        return bool(self.seconds) and self.seconds[-1] - self.seconds[0] >= SHORTEST_JUDGED_S

    def line(self, name: str) -> Line:
        """The line fitted to the samples after the warm-up."""
        start = int(len(self.seconds) * _WARM_UP_SHARE)
        return fit(self.seconds[start:], self.num_bytes[name][start:])

    def verdict(self, name: str) -> str:
        if not self.is_judged:
            return "too short"
        return "GROWS" if self.line(name).grows else "flat"

    @property
    def growing(self) -> list[str]:
        return [name for name in self.num_bytes if self.verdict(name) == "GROWS"]


def fit(seconds: Sequence[float], num_bytes: Sequence[int]) -> Line:
    """Least squares. The error supposes deviations that each resemble the one before, as memory's do."""
    x, y = np.asarray(seconds, float) / 3600, np.asarray(num_bytes, float) / (1 << 20)
    deviations = x - x.mean()
    spread = float(deviations @ deviations) or 1.0  # one sample has no spread
    slope = float(deviations @ (y - y.mean())) / spread
    residuals = y - y.mean() - slope * deviations
    error = float(np.sqrt(residuals @ residuals / max(1, len(x) - 2) / spread)) * _dependence(residuals)
    return Line(float(y[0]), float(y[-1]), slope, error)


def _dependence(residuals: npt.NDArray[np.float64]) -> float:
    """The factor of the error of a slope when each deviation is `r` times the one before, plus chance.

    sqrt((1 + r) / (1 - r)): n such deviations tell as much as n (1 - r) / (1 + r) independent ones. At least 1.
    """
    power = float(residuals @ residuals)
    r = float(residuals[1:] @ residuals[:-1]) / power if power else 0.0
    return float(np.sqrt((1 + r) / (1 - r))) if 0 < r < 1 else 1.0


def measure(processes: Mapping[str, psutil.Process], shared_memory: Path) -> dict[str, int]:
    """The anonymous memory by role, because only this leaks; mapped files are shared with other programs here.

    Raises psutil.NoSuchProcess for a process that has died.
    """
    sizes = {name: anonymous_bytes(process) for name, process in processes.items()}
    return sizes | {SHARED_MEMORY: sum(map(_allocated_bytes, shared_memory.iterdir()))}


def anonymous_bytes(process: psutil.Process) -> int:
    """The bytes of a process that are in memory and in no file. Raises psutil.NoSuchProcess."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        raise psutil.NoSuchProcess(process.pid) from None
    found = re.search(r"^RssAnon:\s*(\d+) kB$", status, re.MULTILINE)
    if found is None:  # it has ended, and waits for its parent
        raise psutil.NoSuchProcess(process.pid)
    return int(found[1]) << 10


def _allocated_bytes(file: Path) -> int:
    """The bytes that a file takes; 0 for a file that is gone meanwhile."""
    with suppress(FileNotFoundError):
        return file.stat().st_blocks * 512
    return 0
