"""The program of the guide sandbox: `python -m multilora_engine.guides.guide_sandbox_process FD < token table`.

FD is a socket. On it the engine hands over one connection for each guide. The program itself reads no guide. It forks a
process for each guide, which reads the guide, compiles it within limits, and ends. So a guide that never ends,
overflows the stack or fills the memory ends only its own process. To fork the next process takes a millisecond or two.
When the engine ends, its end of the socket closes; then the program ends all its processes and itself.

A connection carries the guide as a frame. The answer is one or two frames: the `Trial`, unless a limit ended the
process, and the `End` of the process. The engine closes the connection when nobody waits for the guide; this ends the
guide's process.
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
import threading
import time
from dataclasses import dataclass

import msgspec
from llguidance import LLMatcher, LLTokenizer

from multilora_engine.guides.guide_grammar import TokenTable, grammar_of, make_matcher
from multilora_engine.request import Guide

MAX_STACK_BYTES = 8 << 20
"""The stack of the thread that compiles. A chain of 2,000 rules of a grammar fits."""

MAX_MEMORY_BYTES = 128 << 20
"""The memory that a guide may take, beyond what the process has at its start."""

MAX_CPU_S = 2
"""The CPU time of a guide. The system's limit counts whole seconds only."""

_MASK_STACK_BYTES = 512 << 10
"""The stack of the thread that computes masks, and copies and drops matchers. In the engine, the thread of the steps
does this work with the system's 8 MiB of stack."""

_PR_SET_PDEATHSIG = 1
_LENGTH_BYTES = 4

_libc = ctypes.CDLL(None)
_mallinfo, _Number = (
    (_libc.mallinfo2, ctypes.c_size_t) if hasattr(_libc, "mallinfo2") else (_libc.mallinfo, ctypes.c_int)
)


class Trial(msgspec.Struct, frozen=True, tag=True):
    """The result of compiling a guide. An empty `error` means success.

    grammar: the guide in llguidance's own form.
    build_s: CPU seconds to make a matcher of the grammar.
    kept_bytes: the memory that the compiled guide keeps.
    copy_bytes: the memory that each further copy of the matcher takes.
    """

    error: str = ""
    grammar: str = ""
    build_s: float = 0.0
    kept_bytes: int = 0
    copy_bytes: int = 0


class End(msgspec.Struct, frozen=True, tag=True):
    """The end of a guide's process. signal: the signal that ended it, or 0. cpu_s: the CPU seconds that it took."""

    signal: int
    cpu_s: float


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
    """The process of one guide. alive_fd: a pipe that only this process holds open for writing. It ends with it."""

    pid: int
    connection: socket.socket
    alive_fd: int


class _Sandbox:
    """Forks a process for each connection that the engine hands over, and tells the engine when the process ends."""

    def __init__(self, control: socket.socket, tokenizer: LLTokenizer) -> None:
        self._control = control
        self._tokenizer = tokenizer
        self._children: dict[int, _Child] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> None:
        """Serve until the engine closes its end of the socket."""
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
        except OSError:  # too many processes, or no memory: the engine sees the connection close, and asks again
            for fd in (alive_fd, write_fd, connection.detach()):
                os.close(fd)
            return
        if pid == 0:
            try:
                self._leave_to(connection)
                _confine()
                _try_guide(connection, self._tokenizer)
            finally:
                os._exit(0)
        os.close(write_fd)
        child = _Child(pid, connection, alive_fd)
        self._children[alive_fd] = self._children[connection.fileno()] = child
        self._poll.register(alive_fd, select.POLLIN)
        self._poll.register(connection, select.POLLRDHUP)

    def _leave_to(self, connection: socket.socket) -> None:
        """In a new process: close the descriptors that belong to the program and to other guides."""
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._control.close()
        for fd in self._children:
            os.close(fd)

    def _bury(self, child: _Child) -> None:
        _, status, usage = os.wait4(child.pid, 0)
        end = End(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, usage.ru_utime + usage.ru_stime)
        for fd in (child.alive_fd, child.connection.fileno()):
            del self._children[fd]
        self._poll.unregister(child.alive_fd)
        with contextlib.suppress(KeyError):  # the engine closed it, and it left the poll then
            self._poll.unregister(child.connection)
        with contextlib.suppress(OSError):  # nobody waits
            child.connection.setblocking(False)
            send_frame(child.connection, msgspec.msgpack.encode(end))
        child.connection.close()
        os.close(child.alive_fd)


def _confine() -> None:
    """Set the limits of a guide's process. The system enforces them."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library that panics writes what the client likes
    with open("/proc/self/statm") as file:
        address_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_STACK, MAX_STACK_BYTES)
    _limit(resource.RLIMIT_AS, address_bytes + MAX_STACK_BYTES + MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _try_guide(connection: socket.socket, tokenizer: LLTokenizer) -> None:
    frame = read_frame(connection)
    if frame is not None:
        trial = _compile(msgspec.msgpack.decode(frame, type=Guide), tokenizer)
        send_frame(connection, msgspec.msgpack.encode(trial))


def _compile(guide: Guide, tokenizer: LLTokenizer) -> Trial:
    bytes_before = _used_bytes()
    try:
        grammar = grammar_of(guide)
        started_s = time.process_time()
        matcher = make_matcher(tokenizer, grammar)
    except MemoryError:
        os.abort()
    except BaseException as error:  # a panic of the library is no Exception
        return Trial(error=f"{error}")
    if matcher.is_error():
        return Trial(error=matcher.get_error())
    build_s = time.process_time() - started_s
    copy_bytes: list[int] = []
    threading.stack_size(_MASK_STACK_BYTES)
    thread = threading.Thread(target=_use, args=(matcher, copy_bytes))
    thread.start()
    thread.join()
    kept_bytes = _used_bytes() - bytes_before
    return Trial(grammar=grammar, build_s=build_s, kept_bytes=kept_bytes, copy_bytes=max(0, *copy_bytes))


def _use(matcher: LLMatcher, copy_bytes: list[int]) -> None:
    """Copy the matcher, compute a mask and drop the copy, as the engine will."""
    first = matcher.deep_copy()
    first.compute_bitmask()
    before = _used_bytes()
    second = first.deep_copy()
    copy_bytes.append(_used_bytes() - before)
    del first, second


class _MallInfo(ctypes.Structure):
    """glibc's `mallinfo`: `uordblks` counts the bytes in use in its heaps, `hblkhd` the bytes of larger pieces."""

    _fields_ = [
        *((f"other{i}", _Number) for i in range(4)),
        ("hblkhd", _Number),
        *((f"other{i}", _Number) for i in range(4, 6)),
        ("uordblks", _Number),
        *((f"other{i}", _Number) for i in range(6, 8)),
    ]


_mallinfo.restype = _MallInfo


def _used_bytes() -> int:
    """The memory that the C library has given out."""
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    control = socket.socket(fileno=int(sys.argv[1]))
    tokenizer = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TokenTable).tokenizer()
    # The library keeps some things from its first grammar. Without this, each process would make them again.
    _compile(Guide("json"), tokenizer)
    gc.collect()
    gc.freeze()
    _Sandbox(control, tokenizer).serve()


if __name__ == "__main__":
    main()
