"""`WaitingLine`: the sequences of one client and adapter that wait, small requests a little before large ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from multilora_engine.sequences.sequence import Sequence

TOKENS_OF_A_PLACE = 32
"""For each so many tokens, a sequence lets one later sequence pass."""


class WaitingLine:
    """Sequences in order of arrival, but for each `TOKENS_OF_A_PLACE` tokens a sequence stands one place further back.

    The tokens are those of its prompt, and of the sequences before it in the same request of a client. So a small
    request does not wait for all of one that is long or has many sequences, even where nobody can tell their clients
    apart; and the passed ones wait for no more than about as much work as they bring themselves. Finding a place
    costs the logarithm of the number of waiting sequences.
    """

    def __init__(self) -> None:
        self._places: dict[Sequence, int] = {}
        self._order: list[tuple[int, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._order)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._places

    @property
    def first(self) -> Sequence | None:
        return self._order[0][2] if self._order else None

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that arrives."""
        request = sequence.request
        num_tokens = request.num_tokens_ahead + len(request.prompt_token_ids)
        self._insert(sequence, sequence.arrival + num_tokens // TOKENS_OF_A_PLACE)

    def put_back(self, sequence: Sequence) -> None:
        """Put back a sequence that was the first: before all others, and all later ones."""
        first_place = self._order[0][0] if self._order else sequence.arrival
        self._insert(sequence, min(sequence.arrival, first_place) - 1)

    def hurry(self, sequence: Sequence) -> None:
        """From now on, no later sequence passes a waiting one."""
        place = self._places[sequence]
        self.remove(sequence)
        self._insert(sequence, min(place, sequence.arrival))

    def remove(self, sequence: Sequence) -> None:
        place = self._places.pop(sequence)
        del self._order[bisect_left(self._order, (place, sequence.arrival))]

    def check_integrity(self) -> None:
        assert {sequence: place for place, _, sequence in self._order} == self._places
        assert self._order == sorted(self._order, key=lambda entry: entry[:2])

    def _insert(self, sequence: Sequence, place: int) -> None:
        self._places[sequence] = place
        insort(self._order, (place, sequence.arrival, sequence))
