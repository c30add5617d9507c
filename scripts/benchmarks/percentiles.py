"""Percentiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
