"""`OrderedJobs`: long jobs on a few threads, such that jobs on the same thing keep their order."""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition

LONG_JOB_THREADS = 4
"""Packing and hashing 1 GiB takes seconds, and so does tokenizing 4 MB, or a template of an adapter that never ends:
other requests must not wait for it."""

LONG_JOBS_OF_AN_OWNER = 2
"""The jobs of others find a free thread at once."""

LONG_REQUEST_BYTES = 1 << 14
"""Requests with more bytes than that, weights aside, are read on a thread beside the door's: some 15 ms of work."""


MANY_BYTES = 1 << 20
"""What the tokenizer used for more bytes than that, some hundred times as many, malloc would keep."""

_NICENESS = 10
"""The niceness of the threads: where they and the engine's steps want the same core, the steps go first."""


@dataclass(eq=False, slots=True)
class _Job:
    """owner: whose turn it takes. num_awaited: the number of its keys for which an earlier job has not ended."""

    keys: Collection[Hashable]
    work: Callable[[], None]
    owner: str
    num_awaited: int = 0


class OrderedJobs:
    """Runs the jobs that one thread submits. A job begins when all earlier jobs that share a key with it have ended.

    A short job that has to wait for no other runs at once, on the thread that submits it. Of the jobs that could begin,
    owners take turns, so that nobody waits for all jobs of another. No owner has more than `most_of_an_owner` long jobs
    at once. Jobs must not raise.
    """

    def __init__(self, num_threads: int, name: str, most_of_an_owner: int | None = None) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=_step_back)
        self._num_threads = num_threads
        self._most_of_an_owner = most_of_an_owner or num_threads
        self._running: Counter[str] = Counter()
        """The jobs that have a thread, by owners."""
        self._changed = Condition()
        self._queues: defaultdict[Hashable, deque[_Job]] = defaultdict(deque)
        """The jobs of each key that have not ended, in order."""
        self._num_left = 0
        self._ready: dict[str, deque[_Job]] = {}
        """The jobs of each owner that wait for a thread only; the owner whose turn it is comes first."""

    def submit(self, keys: Collection[Hashable], work: Callable[[], None], is_long: bool, owner: str = "") -> None:
        """Have `work` done when its turn has come. keys: no key twice."""
        with self._changed:
            waits = is_long or any(key in self._queues for key in keys)
            if waits:
                self._enqueue(_Job(keys, work, owner))
        if not waits:
            work()

    def close(self) -> None:
        """Wait until all jobs have ended, and end the threads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queues and not self._num_left)
        self._threads.shutdown()

    def _enqueue(self, job: _Job) -> None:
        for key in job.keys:
            job.num_awaited += key in self._queues
            self._queues[key].append(job)
        self._num_left += 1
        if not job.num_awaited:
            self._begin(job)

    def _begin(self, job: _Job) -> None:
        self._ready.setdefault(job.owner, deque()).append(job)
        self._give_threads()

    def _give_threads(self) -> None:
        """Run the jobs whose turn it is, as far as there are threads."""
        while self._running.total() < self._num_threads:
            turns = (owner for owner in self._ready if self._running[owner] < self._most_of_an_owner)
            if (owner := next(turns, None)) is None:
                return
            jobs = self._ready.pop(owner)
            job = jobs.popleft()
            if jobs:
                self._ready[owner] = jobs  # after the others
            self._running[owner] += 1
            self._threads.submit(self._run, job)

    def _run(self, job: _Job) -> None:
        job.work()
        with self._changed:
            self._running[job.owner] -= 1
            self._running += Counter()  # forgets owners without jobs
            for key in job.keys:
                self._end(job, key)
            self._give_threads()
            self._num_left -= 1
            self._changed.notify_all()

    def _end(self, job: _Job, key: Hashable) -> None:
        """Take a job that has ended out of a key's queue; the next job there may be able to begin."""
        queue = self._queues[key]
        ended = queue.popleft()
        assert ended is job, "jobs of a key end in their order"
        if not queue:
            del self._queues[key]
            return
        queue[0].num_awaited -= 1
        if not queue[0].num_awaited:
            self._begin(queue[0])


def _step_back() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
