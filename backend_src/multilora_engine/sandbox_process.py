"""What the programs of sandboxes share: `serve` forks a process for each piece of a client's work, with limits.

The program `python -m MODULE FD` starts it; FD is a socket. On it the parent hands over one connection for each piece
of work. The program itself reads no work. It forks a process for each piece, which reads the work, does it within
limits, and ends. So work that never ends, overflows the stack or fills the memory ends only its own process. To fork
the next process takes a millisecond or two. When the parent ends, its end of the socket closes; then the program ends
all its processes and itself.

A connection carries the work as a frame. The reply is one or two frames: the `Answer`, unless a limit ended the
process, and the `End` of the process. The parent closes the connection when nobody waits for the answer; this ends the
work's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

_PR_SET_PDEATHSIG = 1
_LENGTH_BYTES = 4

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Limits:
    """Of the process that does a piece of work.

    stack_bytes: the stack of its main thread. memory_bytes: what it may take beyond what it has at its start. cpu_s:
    its CPU time; the system counts whole seconds only.
    """

    stack_bytes: int
    memory_bytes: int
    cpu_s: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What came of the work."""

    content: bytes


class End(msgspec.Struct, frozen=True, tag=True):
    """The end of a process. signal: the signal that ended it, or 0. cpu_s: the CPU seconds that it took."""

    signal: int
    cpu_s: float


def ignore_interrupts() -> None:
    """Ctrl-C at a terminal reaches the program, too, whose end is its parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def serve(limits: Limits, work: Callable[[bytes], bytes]) -> None:
    """Serve until the parent closes its end of the socket.

    work: from the content of a frame to that of an `Answer`. It runs in a process of its own. A MemoryError that it
    raises counts as its limit of memory.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()
    _Sandbox(control, limits, work).serve()


def read_frame(connection: socket.socket) -> bytes | None:
    """Read one frame; None if the other side has closed the connection. Raises OSError."""
    length = _read(connection, _LENGTH_BYTES)
    return None if length is None else _read(connection, int.from_bytes(length, "little"))


def send_frame(connection: socket.socket, content: bytes) -> None:
    """Send one frame. Raises OSError."""
    connection.sendall(len(content).to_bytes(_LENGTH_BYTES, "little") + content)


def _read(connection: socket.socket, num_bytes: int) -> bytes | None:
    content = bytearray()
    while len(content) < num_bytes:
        piece = connection.recv(num_bytes - len(content))
        if not piece:
            return None
        content += piece
    return bytes(content)


@dataclass
class _Child:
    """The process of one piece of work. alive_fd: a pipe that only this process holds open."""

    pid: int
    connection: socket.socket
    alive_fd: int


class _Sandbox:
    """Forks a process for each connection that the parent hands over, and tells the parent when the process ends."""

    def __init__(self, control: socket.socket, limits: Limits, work: Callable[[bytes], bytes]) -> None:
        self._control = control
        self._limits = limits
        self._work = work
        self._children: dict[int, _Child] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> None:
        """Serve until the parent closes its end of the socket."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._control.fileno():
                    if not self._accept():
                        return
                elif (child := self._children.get(fd)) is not None:
                    if fd == child.alive_fd:
                        self._bury(child)
                    else:
                        os.kill(child.pid, signal.SIGKILL)
                        self._poll.unregister(fd)

    def _accept(self) -> bool:
        content, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not content:
            return False
        (fd,) = fds
        self._fork(socket.socket(fileno=fd))
        return True

    def _fork(self, connection: socket.socket) -> None:
        alive_fd, write_fd = os.pipe()
        try:
            pid = os.fork()
        except OSError:  # too many processes, or no memory: the parent sees the connection close, and asks again
            for fd in (alive_fd, write_fd, connection.detach()):
                os.close(fd)
            return
        if pid == 0:
            try:
                self._leave_to(connection)
                _confine(self._limits)
                self._answer(connection)
            finally:
                os._exit(0)
        os.close(write_fd)
        child = _Child(pid, connection, alive_fd)
        self._children[alive_fd] = self._children[connection.fileno()] = child
        self._poll.register(alive_fd, select.POLLIN)
        self._poll.register(connection, select.POLLRDHUP)

    def _leave_to(self, connection: socket.socket) -> None:
        """In a new process: close the descriptors that belong to the program and to other work."""
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._control.close()
        for fd in self._children:
            os.close(fd)

    def _answer(self, connection: socket.socket) -> None:
        """In a new process: do the work."""
        frame = read_frame(connection)
        if frame is None:
            return
        try:
            content = self._work(frame)
        except MemoryError:
            os.abort()
        send_frame(connection, msgspec.msgpack.encode(Answer(content)))

    def _bury(self, child: _Child) -> None:
        _, status, usage = os.wait4(child.pid, 0)
        end = End(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, usage.ru_utime + usage.ru_stime)
        for fd in (child.alive_fd, child.connection.fileno()):
            del self._children[fd]
        self._poll.unregister(child.alive_fd)
        with contextlib.suppress(KeyError):  # the parent closed it, and it left the poll then
            self._poll.unregister(child.connection)
        with contextlib.suppress(OSError):  # nobody waits
            child.connection.setblocking(False)
            send_frame(child.connection, msgspec.msgpack.encode(end))
        child.connection.close()
        os.close(child.alive_fd)


def _confine(limits: Limits) -> None:
    """Set the limits of a process. The system enforces them."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library that panics writes what the client likes
    with open("/proc/self/statm") as file:
        address_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_STACK, limits.stack_bytes)
    _limit(resource.RLIMIT_AS, address_bytes + limits.stack_bytes + limits.memory_bytes)
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
