"""How much memory this process can still take before Linux ends it: the machine's, and that of its control groups.

Linux promises more memory than there is, so that asking for it fails never, and using it ends in a kill.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def available_memory(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes. proc, groups: the root of procfs and of the control groups (version 2).

    Files that Linux holds in memory and can drop count as available.
    """
    machine = _fields(proc / "meminfo")["MemAvailable"] * 1024
    return max(0, min([machine, *_left_in_groups(proc, groups)]))


def give_back_freed_memory() -> None:
    """Give Linux the memory that was freed and that the C library keeps for later, where that is glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """The bytes that this process's group, and each group above it, may still take; groups without a limit are left
    out.
    """
    with contextlib.suppress(OSError, StopIteration):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
        group = groups / next(line for line in lines if line.startswith("0::")).removeprefix("0::/")
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(groups):
                return
            with contextlib.suppress(OSError, ValueError):
                limit = int((folder / "memory.max").read_text())
                used = int((folder / "memory.current").read_text())
                yield limit - used + _fields(folder / "memory.stat")["inactive_file"]


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file whose lines are `name number` or `name: number unit`."""
    lines = (line.replace(":", " ").split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
