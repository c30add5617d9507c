"""The memory that is a process's own, and the memory that falls to it."""

from __future__ import annotations

from pathlib import Path

import psutil


def anonymous_bytes(process: psutil.Process) -> int:
    """The bytes that are in memory and in no file. Raises psutil.NoSuchProcess."""
    return _told_bytes(process, "status", "RssAnon:")


def proportional_bytes(process: psutil.Process) -> int:
    """The bytes that are in memory, those that other processes have in theirs, too, divided among all of them.

    Raises psutil.NoSuchProcess.
    """
    return _told_bytes(process, "smaps_rollup", "Pss:")


def _told_bytes(process: psutil.Process, file: str, key: str) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/{file}").read_text().splitlines()
    except OSError:
        raise psutil.NoSuchProcess(process.pid) from None
    for line in lines:
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise psutil.NoSuchProcess(process.pid)
