"""`GuideTurns`: which guide is compiled next."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from multilora_engine.errors import RequestError
from multilora_engine.request import Guide, Sender
from multilora_engine.sampling.guided import GuideMatcher


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
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[GuideJob]] = {}
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

    def pop(self) -> GuideJob:
        """The next guide; one must wait."""
        name = min(self._waiting, key=lambda name: (self._seconds[name], self._waiting[name][0]))
        self._least_seconds = self._seconds[name]
        job = heapq.heappop(self._waiting[name])
        if not self._waiting[name]:
            del self._waiting[name]
        self._forget()
        return job

    def charge(self, sender: Sender, seconds: float) -> None:
        """A guide of a sender took so long to compile."""
        before = max(self._seconds.get(sender.name, 0.0), self._least_seconds)
        self._seconds[sender.name] = before + seconds / sender.weight

    def _forget(self) -> None:
        """Drop the senders without waiting guides that would start from the least time anyway."""
        least = self._least_seconds
        self._seconds = {name: s for name, s in self._seconds.items() if name in self._waiting or s > least}
