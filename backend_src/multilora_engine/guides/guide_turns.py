"""`GuideTurns`: which guide is compiled next."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from multilora_engine.errors import RequestError
from multilora_engine.guides.guided import GuideMatcher
from multilora_engine.request import Guide, Sender


@dataclass(order=True)
class GuideJob:
    """A guide that a sequence waits for. Jobs compare by size, then by arrival.

    result: the matcher, or the reason that there is none; None until the guide is compiled.
    """

    num_bytes: int
    arrival: int
    guide: Guide = field(compare=False)
    end_tokens: tuple[int, ...] = field(compare=False)
    sender: Sender = field(compare=False)
    deadline_s: float = field(compare=False)
    is_given_up: bool = field(default=False, compare=False)
    result: GuideMatcher | RequestError | None = field(default=None, compare=False)


class GuideTurns:
    """The guides that wait to be compiled. The sender whose guides have taken the least time so far, over its weight,
    goes first, with its smallest guide.

    So a sender with a thousand guides and one with a single guide take turns, and the large guides of a sender wait for
    its small ones. A sender whose guides have not waited for a while starts with the least time of the others:
    nobody saves up.

    Several guides may be compiled at once, but only one of each sender that can be told from others, so that a sender
    of hard ones leaves the others room. Of the same guide one is compiled, and the others wait for what becomes of it.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[GuideJob]] = {}
        self._running: list[GuideJob] = []
        self._seconds: dict[str, float] = {}
        self._least_seconds = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, job: GuideJob) -> None:
        """Let a guide wait for its turn."""
        name = job.sender.name
        if name not in self._waiting:
            self._waiting[name] = []
            self._seconds[name] = max(self._seconds.get(name, 0.0), self._least_seconds)
        heapq.heappush(self._waiting[name], job)

    def pop(self) -> GuideJob | None:
        """The next guide, which is being compiled until `finish`; None while none of those that wait may be."""
        jobs = [job for name in self._waiting if (job := self._next_of(name)) is not None]
        if not jobs:
            return None
        job = min(jobs, key=lambda job: (self._seconds[job.sender.name], job))
        name = job.sender.name
        self._least_seconds = self._seconds[name]
        self._waiting[name].remove(job)
        heapq.heapify(self._waiting[name])
        if not self._waiting[name]:
            del self._waiting[name]
        self._running.append(job)
        self._forget()
        return job

    def finish(self, job: GuideJob, seconds: float) -> None:
        """A guide took its sender so long to compile."""
        self._running = [running for running in self._running if running is not job]
        name = job.sender.name
        before = max(self._seconds.get(name, 0.0), self._least_seconds)
        self._seconds[name] = before + seconds / job.sender.weight

    def _next_of(self, name: str) -> GuideJob | None:
        if name and any(job.sender.name == name for job in self._running):
            return None
        running = {job.guide for job in self._running}
        smallest = self._waiting[name][0]
        if smallest.guide not in running:
            return smallest
        return min((job for job in self._waiting[name] if job.guide not in running), default=None)

    def _forget(self) -> None:
        """Drop the senders without waiting guides that would start from the least time anyway."""
        least = self._least_seconds
        self._seconds = {name: s for name, s in self._seconds.items() if name in self._waiting or s > least}
