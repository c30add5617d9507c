"""The memory that is a process's own."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil


def anonymous_bytes(process: psutil.Process) -> int:
    """The bytes that are in memory and in no file. Raises psutil.NoSuchProcess."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    raise psutil.NoSuchProcess(process.pid, process.name())
