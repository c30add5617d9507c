"""A program sees its own clock and waits by it; the program asks the C library itself."""

from __future__ import annotations

import ast
import errno
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trials.wall_clock import WallClock

HOUR_S = 3600
TIMEOUT_S = 60
"""Everything here takes much less, and the waits would take much longer if it were not for the clock."""

FUTEX = 202 if platform.machine() == "x86_64" else 98
"""The system call's number."""

PROGRAM = """
import ctypes, os, sys, time

libc = ctypes.CDLL(None, use_errno=True)
FUTEX, WAIT_BITSET_BY_WALL_CLOCK, ANY = map(ctypes.c_long, (int(sys.argv[1]), 9 | 256, 0xFFFFFFFF))


def clocks():
    return time.time(), time.monotonic()


def new(kind, *arguments):
    memory = ctypes.create_string_buffer(64)
    assert getattr(libc, kind)(memory, *arguments) == 0
    return memory


def timespec(seconds):
    return (ctypes.c_long * 2)(seconds, 0)


def semaphore(end):
    return libc.sem_timedwait(new("sem_init", 0, 0), timespec(end)) and ctypes.get_errno()


def mutex(end):
    mutex = new("pthread_mutex_init", None)
    libc.pthread_mutex_lock(mutex)
    return libc.pthread_mutex_timedlock(mutex, timespec(end))


def condition(end):
    mutex, condition, end = new("pthread_mutex_init", None), new("pthread_cond_init", None), timespec(end)
    libc.pthread_mutex_lock(mutex)
    while not (result := libc.pthread_cond_timedwait(condition, mutex, end)):
        pass
    return result


def futex(end):
    word, zero = ctypes.c_int(0), ctypes.c_long(0)
    arguments = ctypes.byref(word), WAIT_BITSET_BY_WALL_CLOCK, zero, timespec(end), None, ANY
    return libc.syscall(FUTEX, *arguments) and ctypes.get_errno()


while True:
    print(eval(input()), flush=True)
"""


class Program:
    """It says the value of an expression, or begins with it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self, expression: str) -> None:
        assert self._process.stdin is not None
        print(expression, file=self._process.stdin, flush=True)

    def value(self) -> object:
        assert self._process.stdout is not None
        return ast.literal_eval(self._process.stdout.readline())


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path)


@pytest.fixture
def program(clock: WallClock) -> Iterator[Program]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(FUTEX)],
        env={**os.environ, **clock.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()
        yield Program(process)
        watchdog.cancel()
        process.kill()


@pytest.mark.parametrize("offset_s", [HOUR_S, -HOUR_S])
def test_a_running_program_sees_that_its_clock_is_set_and_no_other_one(
    program: Program, clock: WallClock, offset_s: int
) -> None:
    for expected_s in (0, offset_s, 0):
        clock.set(expected_s)
        before_s = time.time() + expected_s, time.monotonic()
        program.begin("clocks()")
        told_s = program.value()
        after_s = time.time() + expected_s, time.monotonic()
        assert isinstance(told_s, tuple)
        assert all(before <= told <= after for before, told, after in zip(before_s, told_s, after_s, strict=True))


@pytest.mark.parametrize("wait", ["semaphore", "mutex", "condition", "futex"])
def test_a_wait_ends_when_the_clock_is_set_past_its_end(program: Program, clock: WallClock, wait: str) -> None:
    """Whether the wait has begun by then or not."""
    program.begin(f"{wait}({int(time.time()) + HOUR_S // 2})")
    clock.set(HOUR_S)
    assert program.value() == errno.ETIMEDOUT


def test_it_is_the_clock_of_no_other_program(program: Program, clock: WallClock) -> None:
    program.begin("os.getpid()")
    pid = program.value()
    assert isinstance(pid, int)
    assert clock.is_of(pid)
    assert not clock.is_of(os.getpid())
