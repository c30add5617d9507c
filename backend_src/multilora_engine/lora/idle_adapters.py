"""`IdleAdapters`: the adapters on the device that no running sequence uses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Set

from multilora_engine.lora.cached_adapter import CachedAdapter


class IdleAdapters:
    """Adapters with their pages, least recently used first. Adapters with a `lora_index` have an order of their own,
    too.

    A change costs the same however many adapters there are.

    num_pages: of all of them.
    """

    def __init__(self) -> None:
        self._num_pages_of: OrderedDict[CachedAdapter, int] = OrderedDict()
        self._with_index: OrderedDict[CachedAdapter, None] = OrderedDict()
        self.num_pages = 0

    def __iter__(self) -> Iterator[CachedAdapter]:
        return iter(self._num_pages_of)

    def add(self, adapter: CachedAdapter, num_pages: int, has_index: bool) -> None:
        """Nobody uses an adapter any more: it is the most recently used one."""
        self._num_pages_of[adapter] = num_pages
        self.num_pages += num_pages
        if has_index:
            self._with_index[adapter] = None

    def discard(self, adapter: CachedAdapter) -> None:
        """Forget an adapter, if it is here."""
        self.num_pages -= self._num_pages_of.pop(adapter, 0)
        self._with_index.pop(adapter, None)

    def touch(self, adapter: CachedAdapter) -> None:
        """Make an adapter the most recently used one, if it is here."""
        if adapter in self._num_pages_of:
            self._num_pages_of.move_to_end(adapter)
        if adapter in self._with_index:
            self._with_index.move_to_end(adapter)

    def take_index(self) -> CachedAdapter | None:
        """The least recently used adapter that has a `lora_index`, which it loses."""
        return self._with_index.popitem(last=False)[0] if self._with_index else None

    def check_integrity(self, idle: Mapping[CachedAdapter, int], with_index: Set[CachedAdapter]) -> None:
        """idle: the pages of each adapter that should be here. with_index: those of them that have a `lora_index`."""
        assert dict(self._num_pages_of) == idle
        assert self._with_index.keys() == with_index
        assert self.num_pages == sum(idle.values())
