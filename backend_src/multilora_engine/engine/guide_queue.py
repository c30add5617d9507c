"""`GuideQueue`: the sequences that wait for their guides. `GuidesInUse`: how much memory guides may take."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from multilora_engine.engine.accounts import Account, Accounts
from multilora_engine.errors import GuidesFull, GuideTimeout, InternalError, InvalidRequest, RequestError
from multilora_engine.guides.guide_grammar import MAX_GUIDE_BYTES
from multilora_engine.guides.guide_sandbox import GuideWatch
from multilora_engine.guides.guided import GuideMatcher
from multilora_engine.request import Guide, Sender
from multilora_engine.sequences.sequence import Sequence

COMPILE_TIMEOUT_S = 30.0
"""A request whose guide is not compiled after so long ends with UNAVAILABLE."""

_NUM_THREADS = 4
"""So many guides are compiled at once. More than cores, so that guides that take long leave room for others."""

_SMALL_SHARE = 256
"""A guide of up to one 256th of the limit for all is small."""

_logger = logging.getLogger(__name__)


class Compiler(Protocol):
    """The part of `multilora_engine.guides.guided.GuideCompiler` that the queue's threads, and no others, call."""

    def start(self) -> None: ...

    def matcher(self, guide: Guide, end_tokens: tuple[int, ...], watch: GuideWatch | None = None) -> GuideMatcher: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class GuideJob:
    """A guide that a sequence waits for. account: of the client, which pays for compiling.

    result: the matcher, or the reason that there is none; None until the guide is compiled.
    """

    num_bytes: int
    arrival: int
    guide: Guide
    end_tokens: tuple[int, ...]
    sender: Sender
    account: Account
    deadline_s: float
    is_given_up: bool = False
    result: GuideMatcher | RequestError | None = None


class GuideTurns:
    """The guides that wait to be compiled. The guide of the client with the least account goes first, and of one client
    the smallest guide.

    Several guides may be compiled at once, but only one of each sender that can be told from others, so that a sender
    of hard guides leaves the others room. A guide that several sequences have is compiled once at a time.
    """

    def __init__(self) -> None:
        self._waiting: list[GuideJob] = []
        self._running: list[GuideJob] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: GuideJob) -> None:
        """Let a guide wait for its turn."""
        self._waiting.append(job)

    def pop(self) -> GuideJob | None:
        """The next guide, which is being compiled until `finish`; None while no waiting guide may be."""
        guides = {job.guide for job in self._running}
        busy = {job.sender.name for job in self._running} - {""}
        free = (job for job in self._waiting if job.guide not in guides and job.sender.name not in busy)
        job = min(free, key=lambda job: (job.account.use_s, job.num_bytes, job.arrival), default=None)
        if job is not None:
            self._waiting.remove(job)
            self._running.append(job)
        return job

    def finish(self, job: GuideJob, seconds: float) -> None:
        """A guide took so long to compile."""
        self._running.remove(job)
        job.account.guide_s += seconds / job.sender.weight


class GuideQueue:
    """Belongs to the engine's thread. Other threads, which the first guide starts, have guides compiled in the order of
    `GuideTurns`.
    """

    def __init__(self, make_compiler: Callable[[], Compiler], accounts: Accounts) -> None:
        """make_compiler: called by `warm_up`, else by a thread for the first guide."""
        self._make_compiler = make_compiler
        self._accounts = accounts
        self._compiler: Compiler | None = None
        self._making = threading.Lock()
        self._jobs: dict[Sequence, GuideJob] = {}
        self._arrivals = itertools.count()
        self._turns = GuideTurns()
        self._is_closing = False
        self._wake_up = threading.Condition()
        self._has_news = threading.Event()
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        """How many sequences wait."""
        return len(self._jobs)

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences that wait."""
        return iter(self._jobs)

    def warm_up(self) -> None:
        """Make the compiler now, before the first step: making it holds the interpreter for 0.2 s."""
        self._compiler = self._make_compiler()
        self._compiler.start()

    def add(self, sequence: Sequence, guide: Guide, end_tokens: tuple[int, ...]) -> None:
        """Let a sequence wait for its matcher, which `poll` gives, until `give_up`."""
        arrival, deadline_s = next(self._arrivals), time.monotonic() + COMPILE_TIMEOUT_S
        account = self._accounts.open_client(sequence.request.sender)
        job = GuideJob(guide.num_bytes, arrival, guide, end_tokens, sequence.request.sender, account, deadline_s)
        self._jobs[sequence] = job
        with self._wake_up:
            self._turns.add(job)
            self._wake_up.notify()
        while len(self._threads) < _NUM_THREADS:
            name = f"guide-compiler-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def give_up(self, sequence: Sequence) -> bool:
        """Let a sequence wait no longer; whether it did."""
        job = self._jobs.pop(sequence, None)
        if job is not None:
            job.is_given_up = True
            self._accounts.close_client(sequence.request.sender)
        return job is not None

    def poll(self) -> Iterator[tuple[Sequence, GuideMatcher | RequestError]]:
        """The sequences that need wait no longer, with their matcher, or with the reason that there is none."""
        self._has_news.clear()
        now_s = time.monotonic()
        for sequence, job in list(self._jobs.items()):
            result = job.result
            if result is None and job.deadline_s < now_s:
                result = GuideTimeout(job.num_bytes, COMPILE_TIMEOUT_S)
            if result is not None:
                yield sequence, result

    def wait(self, timeout_s: float) -> None:
        """Wait, in an engine that has nothing else to do, until `poll` has something to give, if a sequence waits."""
        if self._jobs:
            self._has_news.wait(timeout_s)

    def close(self) -> None:
        """End the threads, and the compiler's processes."""
        with self._wake_up:
            self._is_closing = True
            self._wake_up.notify_all()
        for thread in self._threads:
            thread.join()
        if self._compiler is not None:
            self._compiler.close()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            seconds = 0.0
            if not job.is_given_up:
                seconds = self._compile(job)
                self._has_news.set()
            with self._wake_up:
                self._turns.finish(job, seconds)
                self._wake_up.notify_all()

    def _next(self) -> GuideJob | None:
        """None when the queue is closed."""
        with self._wake_up:
            job = None
            while not self._is_closing and (job := self._turns.pop()) is None:
                self._wake_up.wait()
            return job

    def _compile(self, job: GuideJob) -> float:
        """Give a job its result; the seconds of processors that took."""
        with self._making:
            self._compiler = compiler = self._compiler or self._make_compiler()
        watch = GuideWatch(lambda: not job.is_given_up and not self._is_closing)
        started_s = time.thread_time()
        job.result = _compile(compiler, job, watch)
        return watch.seconds + time.thread_time() - started_s


MAX_BYTES_IN_FLIGHT = 128 << 20
"""The memory that the guides of all requests may take."""


class GuidesInUse:
    """The memory of the guides of the sequences in the engine: of one that is not compiled its text, of a compiled one
    what it keeps, and what the matcher of each sequence takes beside.

    Half of the room is for small guides only, so that large ones that fill the rest do not shut them out.
    """

    def __init__(self, max_bytes: int = MAX_BYTES_IN_FLIGHT) -> None:
        """max_bytes: of all guides together."""
        self._max_bytes = max_bytes
        self._num_users: Counter[Guide] = Counter()
        self._bytes_of: dict[Guide, int] = {}
        self._num_bytes = 0

    def check(self, guide: Guide) -> None:
        """Raises InvalidRequest for a guide that is too long, GuidesFull when the others leave it no room."""
        if guide.num_bytes > MAX_GUIDE_BYTES:
            raise InvalidRequest(f"the guide has {guide.num_bytes} bytes, at most {MAX_GUIDE_BYTES} are accepted")
        if guide not in self._bytes_of:
            self._check(guide.num_bytes, 0)

    def add(self, guide: Guide) -> None:
        """A sequence with this guide, which has been checked, is in the engine."""
        if guide not in self._bytes_of:
            self._bytes_of[guide] = guide.num_bytes
            self._num_bytes += guide.num_bytes
        self._num_users[guide] += 1

    def compiled(self, guide: Guide, matcher: GuideMatcher) -> None:
        """A sequence with this guide, which was added, gets its matcher. Raises GuidesFull, and nothing has changed."""
        before = self._bytes_of[guide]
        kept = max(before, guide.num_bytes + matcher.compiled.kept_bytes)
        self._check(kept + matcher.num_bytes, before)
        self._bytes_of[guide] = kept
        self._num_bytes += kept - before + matcher.num_bytes

    def remove(self, guide: Guide, matcher: GuideMatcher | None) -> None:
        """A sequence with this guide has ended. matcher: if it had got one."""
        self._num_bytes -= 0 if matcher is None else matcher.num_bytes
        self._num_users[guide] -= 1
        if not self._num_users[guide]:
            del self._num_users[guide]
            self._num_bytes -= self._bytes_of.pop(guide)

    def _check(self, num_bytes: int, counted_bytes: int) -> None:
        """counted_bytes: the part of `num_bytes` that is counted already."""
        is_small = num_bytes <= self._max_bytes // _SMALL_SHARE
        most = self._max_bytes if is_small else self._max_bytes // 2
        others = self._num_bytes - counted_bytes
        if others + num_bytes > most:
            raise GuidesFull(num_bytes, others, self._max_bytes)


def _compile(compiler: Compiler, job: GuideJob, watch: GuideWatch) -> GuideMatcher | RequestError:
    try:
        return compiler.matcher(job.guide, job.end_tokens, watch)
    except RequestError as error:
        return error
    except Exception as error:
        _logger.exception("a guide of %d bytes could not be compiled", job.num_bytes)
        return InternalError(f"{type(error).__name__}: {error}")
