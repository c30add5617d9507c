"""The control groups of Linux that limit this process, and the processors that they leave it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def control_groups(proc: Path = _PROC, groups: Path = _GROUPS) -> Iterator[Path]:
    """The folders of this process's control group (version 2), and of each group above it.

    proc, groups: the roots of procfs and of the control groups.
    """
    with suppress(OSError, StopIteration):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
        group = groups / next(line for line in lines if line.startswith("0::")).removeprefix("0::/")
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(groups):
                return
            yield folder


def usable_processors(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """The processors that this process may run on, or as many as a control group has the time of, if these are fewer.

    A container has a limit of time (`cpu.max`) and sees all processors of its machine. A part of one counts as one.
    """
    shares = [len(os.sched_getaffinity(0))]
    for folder in control_groups(proc, groups):
        with suppress(OSError, ValueError):  # no limit: a group without the file, or with `max` in place of a number
            time_us, period_us = map(int, (folder / "cpu.max").read_text().split())
            shares.append(math.ceil(time_us / period_us))
    return max(1, min(shares))
