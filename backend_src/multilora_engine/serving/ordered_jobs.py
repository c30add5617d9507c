"""`OrderedJobs`: long jobs on a few threads, such that jobs on the same thing keep their order."""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition

_NICENESS = 10
"""The niceness of the threads: where they and the engine's steps want the same core, the steps go first."""


@dataclass(eq=False, slots=True)
class _Job:
    """num_behind: the number of its keys for which an earlier job has not ended."""

    keys: Collection[Hashable]
    work: Callable[[], None]
    num_behind: int = 0


class OrderedJobs:
    """Runs the jobs that one thread submits. A job begins when all earlier jobs that share a key with it have ended.

    A short job that has to wait for no other runs at once, on the thread that submits it. Jobs must not raise.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=_step_back)
        self._changed = Condition()
        self._queues: defaultdict[Hashable, deque[_Job]] = defaultdict(deque)
        """The jobs of each key that have not ended, in order."""

    def submit(self, keys: Collection[Hashable], work: Callable[[], None], is_long: bool) -> None:
        """Have `work` done when its turn has come. keys: no key twice."""
        with self._changed:
            waits = is_long or any(key in self._queues for key in keys)
            if waits:
                self._enqueue(_Job(keys, work))
        if not waits:
            work()

    def close(self) -> None:
        """Wait until all jobs have ended, and end the threads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queues)
        self._threads.shutdown()

    def _enqueue(self, job: _Job) -> None:
        for key in job.keys:
            job.num_behind += key in self._queues
            self._queues[key].append(job)
        if not job.num_behind:
            self._threads.submit(self._run, job)

    def _run(self, job: _Job) -> None:
        job.work()
        with self._changed:
            for key in job.keys:
                self._end(job, key)
            self._changed.notify_all()

    def _end(self, job: _Job, key: Hashable) -> None:
        """Take a job that has ended out of a key's queue; the next job there may be able to begin."""
        queue = self._queues[key]
        ended = queue.popleft()
        assert ended is job, "jobs of a key end in their order"
        if not queue:
            del self._queues[key]
            return
        queue[0].num_behind -= 1
        if not queue[0].num_behind:
            self._threads.submit(self._run, queue[0])


def _step_back() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
