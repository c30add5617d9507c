"""`Histogram`: how many observations lie between which bounds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds for times from a millisecond to minutes."""


@dataclass
class Histogram:
    """counts[i]: observations up to bounds[i] and above the bound before; one more for those above all bounds.

    total: the sum of all observations, which are not negative.
    """

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def plus(self, other: Histogram) -> Histogram:
        """The observations of both, which have the same bounds."""
        assert self.bounds == other.bounds
        counts = [mine + others for mine, others in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.total + other.total)

    def since(self, earlier: Histogram) -> Histogram:
        """The observations after `earlier`; all of them if counting has begun anew since."""
        counts = [mine - others for mine, others in zip(self.counts, earlier.counts, strict=True)]
        if min(counts) < 0:
            return self
        return Histogram(self.bounds, counts, self.total - earlier.total)

    def observations(self) -> Iterator[float]:
        """Observations that make this histogram: the same counts, and the same total but for rounding.

        Those of the finite buckets lie at one fraction of their buckets' widths; those above all bounds share the rest.
        """
        lows = [0.0, *(math.nextafter(bound, math.inf) for bound in self.bounds)]
        widths = [high - low for low, high in zip(lows, self.bounds, strict=False)]
        rest = self.total - sum(low * count for low, count in zip(lows, self.counts, strict=True))
        room = sum(width * count for width, count in zip(widths, self.counts, strict=False))
        num_above = self.counts[-1]
        fraction = 0.0 if num_above or not room else min(1.0, max(0.0, rest / room))
        for low, width, count in zip(lows, widths, self.counts, strict=False):
            yield from [low + fraction * width] * count
        yield from [lows[-1] + max(0.0, rest) / max(1, num_above)] * num_above
