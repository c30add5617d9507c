"""Captured work, its second stream, on which work runs beside a matrix product, and what one stream owns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")
_Product = TypeVar("_Product")

MAX_COUNTERS = 1 << 18
"""The most programs' groups of one launch that count their arrivals."""


def beside(
    work: Callable[[], _Result], product: Callable[[], _Product], device: torch.device
) -> tuple[_Result, _Product]:
    """The results of two pieces of work that need nothing of each other, in the order of the current stream.

    While a CUDA graph is captured, `work` goes to a second stream, so that a GPU may compute both at once. Otherwise
    one follows the other: launches to another stream would cost the host more than such a step has time for.

    No memory needs a `record_stream`. The second stream begins when all is done that the first was given before, and
    the first goes on when the second has ended. So what `work` reads of the first stream's memory cannot be given away
    before it has been read: whoever takes it comes after the end. And memory of the second stream that the first reads
    later, the result of `work`, is given away by the second stream only, whose next work comes after that reading.
    """
    if not _is_captured(device):
        y = product()
        return work(), y
    begun = _recorded_event()
    with _on_second(device):
        _wait(begun)
        result = work()
        ended = _recorded_event()
    y = product()
    _wait(ended)
    return result, y


def capture_graph(run: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """Record the work of `run` on the device. Returns its replay: the same work again, on the same memory.

    pool: a handle of the memory that graphs share, one running at a time; None for memory of its own.
    """
    # Once outside: compiles kernels, and allocates the memory that libraries keep.
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads of the engine may go on using the device while this one captures. A capture whose end fails leaves
    # its stream as the current one: the outer context brings this one back.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def counters(device: torch.device) -> torch.Tensor:
    """How many programs of each group have arrived, int32 [MAX_COUNTERS]: zeros before and after each launch.

    This is work memory of kernels. Launches of one stream follow one another and share it; each of the two streams has
    its own. Captured graphs keep its address.
    """
    return _counters_of_both(device)[int(_is_second(device))]


@functools.cache
def _counters_of_both(device: torch.device) -> torch.Tensor:
    # Of both at once, at the first launch: memory that was made and zeroed within a capture would be the graph's.
    return torch.zeros(2, MAX_COUNTERS, dtype=torch.int32, device=device)


# The seam of streams.


def _is_captured(device: torch.device) -> bool:
    """Whether the current stream is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_second(device: torch.device) -> bool:
    """Whether the current stream is the second."""
    return device.type == "cuda" and torch.cuda.current_stream(device) == _second(device)


def _on_second(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.stream(_second(device))


@functools.cache
def _second(device: torch.device) -> Any:
    # Before the product, whose programs would leave no room: the small work begins first, and the product fills up.
    return torch.cuda.Stream(device, priority=-1)


def _recorded_event() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


def _wait(event: Any) -> None:
    """The current stream goes on when the event has happened."""
    event.wait()
