"""The memory that some work takes for tensors, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], None]) -> int:
    """The growth of memory for tensors at the most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
