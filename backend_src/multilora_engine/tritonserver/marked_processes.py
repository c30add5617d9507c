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


def marked_processes(token: str) -> Iterator[int]:
    """Every process whose environment says it belongs to the server of `token`."""
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes().split(b"\0"):
                yield int(environ.parent.name)


def runs_module(pid: int, module: str) -> bool:
    """Whether a process is Python with this module as its program."""
    with contextlib.suppress(OSError):
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False
