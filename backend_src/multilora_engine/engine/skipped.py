"""`Skipped`: the waiting sequences that a step passes over."""

from __future__ import annotations

from multilora_engine.engine.sequence import Sequence
from multilora_engine.lora.cached_adapter import CachedAdapter

MAX_OVERTAKES = 64
"""A sequence that waits for its adapter lets at most this many later ones with an adapter pass."""


class Skipped:
    """The adapters of these sequences cannot be used yet."""

    def __init__(self) -> None:
        self.adapters: set[CachedAdapter] = set()
        self.must_not_be_overtaken = False
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        assert sequence.adapter is not None
        self.adapters.add(sequence.adapter)
        self.must_not_be_overtaken |= sequence.num_overtakes >= MAX_OVERTAKES
        self._sequences.append(sequence)

    def overtake(self) -> None:
        """A later sequence with an adapter starts."""
        for sequence in self._sequences:
            sequence.num_overtakes += 1
            self.must_not_be_overtaken |= sequence.num_overtakes >= MAX_OVERTAKES
