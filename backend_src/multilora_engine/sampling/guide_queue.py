"""`GuideQueue`: the sequences that wait for their guides; `GuidesInUse`: how much memory guides may take."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from multilora_engine.engine.sequence import Sequence
from multilora_engine.errors import GuidesFull, GuideTimeout, InternalError, InvalidRequest, RequestError
from multilora_engine.request import Guide
from multilora_engine.sampling.guide_turns import GuideJob, GuideTurns
from multilora_engine.sampling.guided import MAX_GUIDE_BYTES, GuideMatcher

_SMALL_SHARE = 256
"""A guide of up to one 256th of the limit for all is small."""

_logger = logging.getLogger(__name__)


class Compiler(Protocol):
    """The part of `multilora_engine.sampling.guided.GuideCompiler` that the queue's thread, and no other, calls."""

    def matcher(self, guide: Guide, end_tokens: tuple[int, ...]) -> GuideMatcher: ...


class GuideQueue:
    """Belongs to the engine's thread; guides are compiled in another one, which the first guide starts. `GuideTurns`
    says in which order. It computes while the cores have nothing else to do, such as in the pauses of a step.
    """

    def __init__(self, make_compiler: Callable[[], Compiler], timeout_s: float) -> None:
        """make_compiler: called by `warm_up`, else by the thread for the first guide. timeout_s: the longest wait."""
        self._make_compiler = make_compiler
        self._compiler: Compiler | None = None
        self._timeout_s = timeout_s
        self._jobs: dict[Sequence, GuideJob] = {}
        self._arrivals = itertools.count()
        self._turns = GuideTurns()
        self._is_closing = False
        self._wake_up = threading.Condition()
        self._has_news = threading.Event()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """How many sequences wait."""
        return len(self._jobs)

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences that wait."""
        return iter(self._jobs)

    def warm_up(self) -> None:
        """Make the compiler now, before the first step: making it holds the interpreter for 0.2 s."""
        self._compiler = self._make_compiler()

    def add(self, sequence: Sequence, guide: Guide, end_tokens: tuple[int, ...]) -> None:
        """Let a sequence wait for its matcher, which `poll` gives, until `give_up`."""
        arrival, deadline_s = next(self._arrivals), time.monotonic() + self._timeout_s
        job = GuideJob(guide.num_bytes, arrival, guide, end_tokens, sequence.request.sender, deadline_s)
        self._jobs[sequence] = job
        with self._wake_up:
            self._turns.add(job)
            self._wake_up.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="guide-compiler", daemon=True)
            self._thread.start()

    def give_up(self, sequence: Sequence) -> bool:
        """Let a sequence wait no longer; whether it did."""
        job = self._jobs.pop(sequence, None)
        if job is not None:
            job.is_given_up = True
        return job is not None

    def poll(self) -> Iterator[tuple[Sequence, GuideMatcher | RequestError]]:
        """The sequences that need wait no longer, with their matcher, or with the reason that there is none."""
        self._has_news.clear()
        now_s = time.monotonic()
        for sequence, job in list(self._jobs.items()):
            result = job.result
            if result is None and job.deadline_s < now_s:
                result = GuideTimeout(job.num_bytes, self._timeout_s)
            if result is not None:
                yield sequence, result

    def wait(self, timeout_s: float) -> None:
        """Wait, in an engine that has nothing else to do, until `poll` has something to give, if a sequence waits."""
        if self._jobs:
            self._has_news.wait(timeout_s)

    def close(self) -> None:
        """End the thread, behind the guide that it is compiling."""
        with self._wake_up:
            self._is_closing = True
            self._wake_up.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # A step's threads sleep and wake hundreds of times. One that wakes takes its core from a thread of this class
        # at once; from a thread that is only nice, after milliseconds.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while (job := self._next()) is not None:
            if not job.is_given_up:
                self._compile(job)
                self._has_news.set()

    def _next(self) -> GuideJob | None:
        """None when the queue is closed."""
        with self._wake_up:
            self._wake_up.wait_for(lambda: self._turns or self._is_closing)
            return None if self._is_closing else self._turns.pop()

    def _compile(self, job: GuideJob) -> None:
        self._compiler = self._compiler or self._make_compiler()
        started_s = time.thread_time()
        job.result = _compile(self._compiler, job)
        with self._wake_up:
            self._turns.charge(job.sender, time.thread_time() - started_s)


class GuidesInUse:
    """The guides of the sequences in the engine. A grammar takes up to some hundred times the memory of its guide.

    Half of the room is for small guides only, so that large ones that fill the rest do not shut them out.
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of all different guides together."""
        self._max_bytes = max_bytes
        self._num_users: Counter[Guide] = Counter()
        self._num_bytes = 0

    def check(self, guide: Guide) -> None:
        """Raises InvalidRequest for a guide that is too long, GuidesFull when the others leave it no room."""
        if guide.num_bytes > MAX_GUIDE_BYTES:
            raise InvalidRequest(f"the guide has {guide.num_bytes} bytes, at most {MAX_GUIDE_BYTES} are accepted")
        is_small = guide.num_bytes <= self._max_bytes // _SMALL_SHARE
        most = self._max_bytes if is_small else self._max_bytes // 2
        if guide not in self._num_users and self._num_bytes + guide.num_bytes > most:
            raise GuidesFull(guide.num_bytes, self._num_bytes, self._max_bytes)

    def add(self, guide: Guide) -> None:
        """A sequence with this guide, which has been checked, is in the engine."""
        if guide not in self._num_users:
            self._num_bytes += guide.num_bytes
        self._num_users[guide] += 1

    def remove(self, guide: Guide) -> None:
        """A sequence with this guide has ended."""
        self._num_users[guide] -= 1
        if not self._num_users[guide]:
            del self._num_users[guide]
            self._num_bytes -= guide.num_bytes


def _compile(compiler: Compiler, job: GuideJob) -> GuideMatcher | RequestError:
    try:
        return compiler.matcher(job.guide, job.end_tokens)
    except RequestError as error:
        return error
    except Exception as error:
        _logger.exception("a guide of %d bytes could not be compiled", job.num_bytes)
        return InternalError(f"{type(error).__name__}: {error}")
