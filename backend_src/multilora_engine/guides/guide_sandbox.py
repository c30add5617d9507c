"""`GuideSandbox`: the engine's side of the sandbox, which tries guides before the engine compiles them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from multilora_engine.errors import Cancelled, InvalidRequest, Unavailable
from multilora_engine.guides.guide_grammar import TokenTable
from multilora_engine.guides.guide_sandbox_process import (
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    MAX_STACK_BYTES,
    End,
    Trial,
    read_frame,
    send_frame,
)
from multilora_engine.log_lines import one_line
from multilora_engine.request import Guide

_LIMITS = {
    signal.SIGXCPU: f"{MAX_CPU_S} s",
    signal.SIGSEGV: f"{MAX_STACK_BYTES} bytes of stack",
    signal.SIGBUS: f"{MAX_STACK_BYTES} bytes of stack",
    signal.SIGABRT: f"{MAX_MEMORY_BYTES} bytes of memory",
}
"""The limit that a guide's process has exceeded, by the signal that ended it."""

_MAX_ERROR_CHARS = 500

_NUM_TRIES = 3
"""How often a guide is tried whose process ends by no fault of the guide."""

_POLL_MS = 50
"""How often a thread that waits for a guide asks whether the guide is still wanted."""


@dataclass
class GuideWatch:
    """Shared by the thread that waits for a guide and the thread that compiles it.

    is_wanted: whether anybody still waits for the guide. Any thread may call it.
    seconds: the CPU time that the guide took in the sandbox.
    """

    is_wanted: Callable[[], bool] = lambda: True
    seconds: float = 0.0


class GuideSandbox:
    """Tries each guide in a process of its own, which has limits of stack, memory and time. Several threads may ask.

    One process has the token table and forks the processes of guides. The first guide or `start` starts it. If it ends,
    the next guide starts it again.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = msgspec.msgpack.encode(table)
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process that forks the processes of guides. Raises OSError."""
        with self._lock:
            self._start()

    def try_guide(self, guide: Guide, watch: GuideWatch) -> Trial:
        """Compile a guide in a process of its own.

        Raises InvalidRequest if the guide is malformed or exceeds a limit, Cancelled if nobody wants the guide any
        more, and Unavailable if its process ended for another reason.
        """
        for _ in range(_NUM_TRIES):
            try:
                trial, end = self._ask(guide, watch)
            except OSError:
                continue  # the process that makes processes has ended; the next try starts it
            if end is None or (trial is None and end.signal not in _LIMITS):
                continue
            watch.seconds += end.cpu_s
            return self._judge(guide, trial, end)
        raise Unavailable("the process that compiled the guide was ended from outside, several times; try again")

    def close(self) -> None:
        """End the process and all processes of guides."""
        with self._lock:
            self._stop()

    def _ask(self, guide: Guide, watch: GuideWatch) -> tuple[Trial | None, End | None]:
        """The two answers of the sandbox; None for an answer that did not come. Raises OSError, Cancelled."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            send_frame(ours, msgspec.msgpack.encode(guide))
            trial = end = None
            while end is None:
                _await(ours, watch)
                frame = read_frame(ours)
                if frame is None:
                    break
                answer = msgspec.msgpack.decode(frame, type=Trial | End)
                trial, end = (answer, end) if isinstance(answer, Trial) else (trial, answer)
            return trial, end

    def _judge(self, guide: Guide, trial: Trial | None, end: End) -> Trial:
        name = f"the {guide.type} guide"
        if trial is None:
            limit = _LIMITS[signal.Signals(end.signal)]
            raise InvalidRequest(f"{name} of {guide.num_bytes} bytes takes more than {limit} to compile")
        if trial.error:
            raise InvalidRequest(f"{name} is malformed: {one_line(trial.error, _MAX_ERROR_CHARS)}")
        return trial

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
                [sys.executable, "-m", "multilora_engine.guides.guide_sandbox_process", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                # Otherwise each thread gets a heap of its own, which takes 64 MiB of address space.
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(self._table)

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


def _await(connection: socket.socket, watch: GuideWatch) -> None:
    """Wait for an answer. Raises Cancelled."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(_POLL_MS):
        if not watch.is_wanted():
            raise Cancelled("nobody waits for the guide any more")
