"""`Sandbox`: does work that a client chose in processes with limits, which `sandbox_process` forks."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from multilora_engine.errors import Cancelled, Unavailable
from multilora_engine.sandbox_process import Answer, End, Limits, read_frame, send_frame
from multilora_engine.shared_python import python_executable

_NUM_TRIES = 3
"""How often work is tried whose process ends by no fault of the work."""

_POLL_MS = 50
"""How often a thread that waits for an answer asks whether the answer is still wanted."""


@dataclass(frozen=True)
class Outcome:
    """content: the answer; None if the work exceeded a limit, which `exceeded` names. cpu_s: what the work took."""

    content: bytes | None
    exceeded: str
    cpu_s: float


class Sandbox:
    """Does each piece of work in a process of its own, which has limits of stack, memory and time.

    Several threads may ask. One program forks the processes of the work. The first work or `start` starts the program.
    If it ends, the next work starts it again.
    """

    def __init__(self, module: str, limits: Limits, preamble: bytes = b"") -> None:
        """module: the program, which calls `sandbox_process.serve`. preamble: its standard input."""
        self._module = module
        self._preamble = preamble
        self._limits = {
            signal.SIGXCPU: f"{limits.cpu_s} s",
            signal.SIGSEGV: f"{limits.stack_bytes} bytes of stack",
            signal.SIGBUS: f"{limits.stack_bytes} bytes of stack",
            signal.SIGABRT: f"{limits.memory_bytes} bytes of memory",
        }
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the program. Raises OSError."""
        with self._lock:
            self._start()

    def ask(self, work: bytes, is_wanted: Callable[[], bool] = lambda: True) -> Outcome:
        """Do a piece of work in a process of its own.

        is_wanted: whether anybody still waits for the answer. Raises Cancelled if nobody does, and Unavailable if the
        process ended for another reason than a limit.
        """
        for _ in range(_NUM_TRIES):
            try:
                answer, end = self._ask(work, is_wanted)
            except OSError:
                continue  # the program has ended; the next try starts it
            if end is not None and answer is not None:
                return Outcome(answer.content, "", end.cpu_s)
            if end is not None and end.signal in self._limits:
                return Outcome(None, self._limits[signal.Signals(end.signal)], end.cpu_s)
        raise Unavailable("the process of the sandbox was ended from outside, several times; try again")

    def close(self) -> None:
        """End the program and all processes of work."""
        with self._lock:
            self._stop()

    def _ask(self, work: bytes, is_wanted: Callable[[], bool]) -> tuple[Answer | None, End | None]:
        """The two replies of the program; None for a reply that did not come. Raises OSError, Cancelled."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            send_frame(ours, work)
            answer = end = None
            while end is None:
                _await(ours, is_wanted)
                frame = read_frame(ours)
                if frame is None:
                    break
                reply = msgspec.msgpack.decode(frame, type=Answer | End)
                answer, end = (reply, end) if isinstance(reply, Answer) else (answer, reply)
            return answer, end

    def _hand_over(self, connection: socket.socket) -> None:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [b"g"], [connection.fileno()])
            except OSError:
                self._stop()
                raise

    def _start(self) -> None:
        self._stop()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python_executable(), "-m", self._module, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                # Otherwise each thread gets a heap of its own, which takes 64 MiB of address space.
                env={**os.environ, "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(self._preamble)

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


def _await(connection: socket.socket, is_wanted: Callable[[], bool]) -> None:
    """Wait for a reply. Raises Cancelled."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(_POLL_MS):
        if not is_wanted():
            raise Cancelled("nobody waits for the answer any more")
