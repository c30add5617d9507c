"""CPU time by process: of a server's processes, by what they are, and of the client that asks it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from multilora_engine.process.paths import ENGINE_MODULE

CLIENT = "this client"


class CpuTimes:
    """Reads the CPU time of the process `server_pid`, of all processes that it had started by then, and of this one."""

    def __init__(self, server_pid: int) -> None:
        server = psutil.Process(server_pid)
        self._processes = {process.pid: process for process in (server, *server.children(recursive=True))}

    def read(self) -> dict[str, float]:
        """Seconds so far, user and system together. Raises psutil.NoSuchProcess for a process that has ended."""
        seconds = {CLIENT: time.process_time()}
        for process in self._processes.values():
            times = process.cpu_times()
            name = process_name(process)
            seconds[name] = seconds.get(name, 0.0) + times.user + times.system
        return seconds


def process_name(process: psutil.Process) -> str:
    """The name of a process; a stub has its model's name."""
    words = process.cmdline()
    if ENGINE_MODULE in words:
        return "engine"
    models = [Path(word).parents[1].name for word in words if word.endswith("/model.py")]
    return models[0] if models else process.name()


def seconds_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The difference of two readings, by process."""
    return {name: seconds - before[name] for name, seconds in after.items()}
