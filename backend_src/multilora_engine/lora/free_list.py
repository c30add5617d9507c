"""`FreeList`: which of a fixed number of equal places (KV blocks, adapter pages) are free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class FreeList:
    """Places `0 .. count - 1`, each free or owned by exactly one owner."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` places that nobody else has; the caller has made sure that there are as many."""
        assert count <= len(self._free), f"{count} places wanted, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def free(self, places: Sequence[int]) -> None:
        self._free.extend(places)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Every place is free or owned, by one owner, once. `owned`: the places of each owner."""
        places = sorted([place for owner in owned for place in owner] + self._free)
        assert places == list(range(self.count)), f"places lost or shared: {places}"
