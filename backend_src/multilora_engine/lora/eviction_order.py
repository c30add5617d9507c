"""`EvictionOrder`: which adapters leave host memory first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from multilora_engine.lora.adapter_state import FreedBy
from multilora_engine.lora.cached_adapter import CachedAdapter


class EvictionOrder:
    """The adapters that have pages, by the `FreedBy` of these, each kind least recently used first.

    A change of one adapter costs the same however many there are.
    """

    def __init__(self) -> None:
        self._orders: dict[FreedBy, OrderedDict[CachedAdapter, None]] = {kind: OrderedDict() for kind in FreedBy}
        self._num_pages = dict.fromkeys(FreedBy, 0)
        self._kinds: dict[CachedAdapter, FreedBy] = {}

    def update(self, adapter: CachedAdapter) -> None:
        """Put an adapter where its state says: as the most recently used one there if it was elsewhere."""
        kind = adapter.state.freed_by
        if self._kinds.get(adapter) is kind:
            return
        self.discard(adapter)
        self._kinds[adapter] = kind
        self._orders[kind][adapter] = None
        self._num_pages[kind] += len(adapter.pages)

    def discard(self, adapter: CachedAdapter) -> None:
        """Forget an adapter, if it is here."""
        kind = self._kinds.pop(adapter, None)
        if kind is not None:
            del self._orders[kind][adapter]
            self._num_pages[kind] -= len(adapter.pages)

    def touch(self, adapter: CachedAdapter) -> None:
        """Make an adapter the most recently used one of its kind, if it is here."""
        kind = self._kinds.get(adapter)
        if kind is not None:
            self._orders[kind].move_to_end(adapter)

    @property
    def unused(self) -> Iterator[CachedAdapter]:
        """The adapters without users, in the order in which they can leave."""
        for kind in FreedBy:
            if kind is not FreedBy.END_OF_USE:
                yield from self._orders[kind]

    @property
    def num_unused_pages(self) -> int:
        """Pages of the adapters in `unused`."""
        return sum(self._num_pages.values()) - self._num_pages[FreedBy.END_OF_USE]

    def check_integrity(self, adapters: Iterable[CachedAdapter]) -> None:
        """The adapters that have pages, and no others, are where they belong."""
        assert self._kinds == {adapter: adapter.state.freed_by for adapter in adapters if adapter.pages}
        for kind, order in self._orders.items():
            assert all(self._kinds[adapter] is kind for adapter in order)
            assert self._num_pages[kind] == sum(len(adapter.pages) for adapter in order)
