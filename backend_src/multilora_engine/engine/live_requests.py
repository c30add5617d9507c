"""`LiveRequests`: the requests in the engine, their clients and their deadlines."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from multilora_engine.engine.sequence import Sequence, SequenceStatus

_NUM_PAST_DEADLINES = 64
"""How many deadlines of requests that have ended are kept, at least: forgetting them one by one would take a search."""


class LiveRequests:
    """Each request from acceptance to its end, by its sequence, in order of arrival."""

    def __init__(self) -> None:
        self._sequences: dict[str, Sequence] = {}
        self._num_of_client: Counter[str] = Counter()
        self._deadlines: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def get(self, request_id: str) -> Sequence | None:
        """The sequence of a request, None if it has ended."""
        return self._sequences.get(request_id)

    def num_of(self, client: str) -> int:
        """How many requests of a client are in the engine."""
        return self._num_of_client[client]

    def oldest_waiting(self) -> Sequence:
        """The request that waits and arrived first. There must be one."""
        return next(sequence for sequence in self if sequence.status is SequenceStatus.WAITING)

    def roots(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The sequences that stand for the requests of `sequences` that have not ended, each once, in their order."""
        unended = (s for s in sequences if s.status is not SequenceStatus.FINISHED)
        return [self._sequences[id_] for id_ in dict.fromkeys(s.request.request_id for s in unended)]

    def add(self, sequence: Sequence, deadline_s: float) -> None:
        """A request was accepted. deadline_s: by the monotonic clock."""
        request = sequence.request
        self._sequences[request.request_id] = sequence
        self._num_of_client[request.sender.account] += 1
        heapq.heappush(self._deadlines, (deadline_s, sequence.arrival, request.request_id))
        if len(self._deadlines) > 2 * len(self._sequences) + _NUM_PAST_DEADLINES:
            self._deadlines = [deadline for deadline in self._deadlines if deadline[2] in self._sequences]
            heapq.heapify(self._deadlines)

    def remove(self, sequence: Sequence) -> None:
        """A request has ended."""
        del self._sequences[sequence.request.request_id]
        self._num_of_client.subtract([client := sequence.request.sender.account])
        if not self._num_of_client[client]:
            del self._num_of_client[client]

    def take_expired(self, now_s: float) -> list[Sequence]:
        """The requests whose deadlines have passed, each told of once."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.arrival == arrival:
                expired.append(sequence)
        return expired

    def check_integrity(self) -> None:
        """Clients are counted as their requests are. For tests, after every step."""
        assert self._num_of_client == Counter(sequence.request.sender.account for sequence in self)
        assert {request_id for _, _, request_id in self._deadlines} >= set(self._sequences), "a deadline is lost"
