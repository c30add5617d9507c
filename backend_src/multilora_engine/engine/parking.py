"""`Parking`: the sequences whose adapters are being fetched from a source."""

from __future__ import annotations

from collections.abc import Iterator

from multilora_engine.engine.sequence import Sequence
from multilora_engine.lora.remote import Fetch, RemoteAdapters


class Parking:
    """Sequences wait here outside of the queue, so that a fetch holds up nobody, however long it takes."""

    def __init__(self, remote: RemoteAdapters) -> None:
        self._remote = remote
        self._parked: dict[Fetch, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._parked.values()))

    def add(self, sequence: Sequence, fetch: Fetch) -> None:
        """Let a sequence wait for a fetch that it has asked for."""
        self._parked.setdefault(fetch, []).append(sequence)

    def take_arrived(self) -> Iterator[tuple[Sequence, Fetch]]:
        """The sequences whose fetches are done; they are here no more."""
        for fetch in self._remote.poll():
            for sequence in self._parked.pop(fetch, []):
                yield sequence, fetch

    def give_up(self, sequence: Sequence) -> None:
        """Take out a sequence that waits no longer."""
        fetch = next(fetch for fetch, parked in self._parked.items() if sequence in parked)
        self._parked[fetch].remove(sequence)
        if not self._parked[fetch]:
            del self._parked[fetch]
        self._remote.give_up(fetch)

    def check_integrity(self) -> None:
        """Nobody waits for a fetch that is done. For tests, after every step."""
        self._remote.check_integrity()
        assert all(sequences and not fetch.is_done for fetch, sequences in self._parked.items())
