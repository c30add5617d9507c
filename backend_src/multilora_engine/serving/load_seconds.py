"""`LoadSeconds`: the histogram of the time it takes to bring adapters into memory, on the server's metrics port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multilora_engine.histogram import SECONDS, Histogram
from multilora_engine.lora.life_cycle import Residency
from multilora_engine.serving.triton_api import backend_utils

NAME = "multilora_lora_adapter_load_seconds"
DESCRIPTION = "Seconds to load an adapter into host memory, or to activate it: from there to the device"


@dataclass
class _Series:
    """One metric of the server's, and the observations it has been told."""

    handle: Any
    told: Histogram


class LoadSeconds:
    """A histogram of the server's own kind, with the label `transition`: gateways read no other. For one thread.

    The server takes single observations: it gets some that make the same histogram.
    """

    def __init__(self) -> None:
        pb = backend_utils()
        family = pb.MetricFamily(name=NAME, description=DESCRIPTION, kind=pb.MetricFamily.HISTOGRAM)
        self._family = family
        self._series = {
            transition: _Series(family.Metric(labels={"transition": transition}, buckets=list(SECONDS)), Histogram())
            for transition in ("load", "activate")
        }

    def update(self, residency: Residency) -> None:
        """Tell of the loads since the last time."""
        self._observe(self._series["load"], residency.load_seconds)
        self._observe(self._series["activate"], residency.activate_seconds)

    def clear(self) -> None:
        """Remove the histogram."""
        self._series.clear()
        self._family = None

    @staticmethod
    def _observe(series: _Series, latest: Histogram) -> None:
        for seconds in latest.since(series.told).observations():
            series.handle.observe(seconds)
        series.told = latest
