"""How an adapter's pages come from the host to the device: at once, or on a stream of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class PageCopy(Protocol):
    """The copying of one adapter."""

    def is_done(self) -> bool:
        """Whether it has ended. Raises RuntimeError if it failed."""

    def wait(self) -> float:
        """Seconds it took, when it has ended. Raises RuntimeError if it failed."""


CopyPages = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], PageCopy]
"""Starts to copy pages, or runs of pages, of the host to as many of the device. Raises RuntimeError if it cannot.

Copies end in the order in which they began, and however a copy ends, a later copy to the same pages comes after it.
"""


def copies_to(device: torch.device) -> CopyPages:
    """How pages come to a device."""
    return StreamCopies(device) if device.type == "cuda" else copy_at_once


def copy_at_once(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> PageCopy:
    """The copy has ended when it is given back."""
    started = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    return _EndedCopy(time.perf_counter() - started)


class StreamCopies:
    """Copies on a stream of their own, beside the steps; the host's pages have to be pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> PageCopy:
        copy = _StreamCopy(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        # The pages may still be read by a step that was launched before their last owner left.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy.started.record(self._stream)
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            copy.ended.record(self._stream)
        return copy


@dataclass(frozen=True)
class _EndedCopy:
    seconds: float

    def is_done(self) -> bool:
        return True

    def wait(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class _StreamCopy:
    """Events recorded on the stream before the first page and after the last."""

    started: torch.cuda.Event
    ended: torch.cuda.Event

    def is_done(self) -> bool:
        return bool(self.ended.query())

    def wait(self) -> float:
        self.ended.synchronize()
        return float(self.started.elapsed_time(self.ended)) / 1000
