"""The processes of one server: the server, its stubs and its engines, found by a mark in their environment.

The mark finds a process after its parent has died, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

TOKEN_VARIABLE = "MULTILORA_SERVER"
"""The environment variable that holds the server's token."""


def kill_marked_processes(token: str, spared: Collection[int] = ()) -> None:
    """SIGKILL every process of the server of `token` but those `spared`."""
    for pid in set(marked_processes(token)).difference(spared):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked_processes(token: str, proc: Path = Path("/proc")) -> Iterator[int]:
    """Every process whose environment says it belongs to the server of `token`.

    proc: a directory like proc(5), with a directory for each process.
    """
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    # Not `glob`, which lets an error through that a process causes when it ends at the wrong moment (ESRCH).
    for name in filter(str.isdecimal, os.listdir(proc)):
        with contextlib.suppress(OSError):
            if mark in (proc / name / "environ").read_bytes().split(b"\0"):
                yield int(name)


def dead_children(parent: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """Every child of a process that has ended, and that the parent has not noticed yet.

    proc: a directory like proc(5), with a directory for each process.
    """
    for name in filter(str.isdecimal, os.listdir(proc)):
        with contextlib.suppress(OSError):
            # The name, between brackets, may have any characters.
            state, parent_pid, *_ = (proc / name / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if state == "Z" and int(parent_pid) == parent:
                yield int(name)


def runs_module(pid: int, module: str) -> bool:
    """Whether a process is Python with this module as its program."""
    with contextlib.suppress(OSError):
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False
