"""`AdapterUsage`: requests and tokens of the adapters (or clients) most asked for, in bounded space."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_REMEMBERED_PER_PLACE = 16
"""Adapters whose requests are counted to find those most asked for, in all."""

_LEAD = 2
"""How many times the requests of the last one an adapter needs to take its place: keeps the places from flapping."""


@dataclass
class Usage:
    """Requests that ended, and tokens of their prompts and answers."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens


MAX_ADAPTERS = 32
"""Adapters that have metrics of their own; a metrics system keeps a series for each."""


class AdapterUsage:
    """Counts `max_adapters` adapters one by one and the rest together.

    Nothing is ever counted twice and no count ever falls, as counters of a metrics system must not. An adapter that
    takes the place of another starts at zero there: its earlier counts are in `other`, which only grows.
    """

    def __init__(self, max_adapters: int = MAX_ADAPTERS) -> None:
        self.other = Usage()
        self.max_adapters = max_adapters
        self._by_label: dict[str, Usage] = {}
        self._popularity: OrderedDict[str, int] = OrderedDict()

    @property
    def by_label(self) -> dict[str, Usage]:
        """The adapters that have a place."""
        return dict(self._by_label)

    def record(self, label: str, prompt_tokens: int, output_tokens: int) -> None:
        """A request of an adapter has ended."""
        self._popularity[label] = self._popularity.pop(label, 0) + 1
        usage = self._by_label.get(label) or self._new_place(label) or self.other
        usage.add(prompt_tokens, output_tokens)
        self._forget_unpopular()

    def _new_place(self, label: str) -> Usage | None:
        """A place for an adapter without one, if one is free or its owner is asked for much less."""
        if not self.max_adapters:
            return None
        if len(self._by_label) == self.max_adapters:
            last = min(self._by_label, key=self._popularity.__getitem__)
            if self._popularity[label] < _LEAD * self._popularity[last]:
                return None
            del self._by_label[last]
        return self._by_label.setdefault(label, Usage())

    def _forget_unpopular(self) -> None:
        """Drop the adapter without a place that was asked for longest ago, when there are too many of them."""
        if len(self._popularity) > _REMEMBERED_PER_PLACE * self.max_adapters:
            without_place = (label for label in self._popularity if label not in self._by_label)
            del self._popularity[next(without_place)]
