"""Processes that end when the one that started them ends, whatever ended that.

`end_with_parent`: for a program that this process starts; Linux ends it. Run as a program, this file becomes the other
one (`exec`), so that no code of a process with threads runs between its fork and its exec. `watch_parent`: for this
process, started by a program that is not ours.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent(command: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The command line of a program that gets SIGKILL when this process ends, or the thread that starts the program.

    The process keeps its id and becomes `command`, whose first word is looked up on the new process's PATH.
    """
    python = str(Path(sys.prefix) / "bin" / "python3")  # in a Triton stub `sys.executable` is none
    return [python, "-I", "-S", __file__, str(os.getpid()), *(os.fspath(word) for word in command)]


def watch_parent() -> None:
    """Have this process killed once its parent has ended.

    Not by Linux: for it the parent is the thread that started the process, which may end long before.
    """
    parent = os.getppid()
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.getppid() != parent:  # it ended, and another process may have its id
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_end_after, args=(fd,), name="parent-watch", daemon=True).start()


def _end_after(fd: int) -> None:
    select.select([fd], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _become(parent: int, command: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be told of
        os.kill(os.getpid(), signal.SIGKILL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
