"""Copies between host and device in every step, without waiting for the device: `to_device`, `FromDevice`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 8
"""Elements of 64 bytes: Triton compiles a kernel anew for memory that does not begin at a multiple of 16."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor's values on `device`; on a CPU the tensor itself.

    A copy from pageable memory would wait until the device has done its earlier work. A copy from pinned memory queues
    after that work, and the host goes on. torch keeps the pinned memory until the copy is over.
    """
    return _sent(tensor, device) if is_apart(device) else tensor


def arrays_to_device(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """`to_device` for several arrays in one copy. One copy of all takes the driver as long as a copy of one."""
    if not is_apart(device):
        return [torch.from_numpy(array) for array in arrays]
    sent = _sent(torch.from_numpy(_joined(arrays)), device)
    starts = _starts(arrays)
    return [
        sent[start : start + array.size].view(array.shape) for start, array in zip(starts[:-1], arrays, strict=True)
    ]


class FromDevice:
    """The values of device tensors on their way to the host. On a CPU they are there already."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        """The copies queue after the device's earlier work. Later work does not delay them."""
        are_apart = is_apart(tensors[0].device)
        self._values = [_fetched(tensor) for tensor in tensors] if are_apart else list(tensors)
        self._arrived = _recorded_event() if are_apart else None

    def wait(self) -> list[torch.Tensor]:
        """The values. Waits until all have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def _joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """All elements, each array at its place of `_starts`. The gaps between arrays are undefined."""
    starts = _starts(arrays)
    joined = np.empty(starts[-1], np.int64)
    for start, array in zip(starts[:-1], arrays, strict=True):
        joined[start : start + array.size] = array.ravel()
    return joined


def _starts(arrays: Sequence[NDArray[np.int64]]) -> list[int]:
    """The place of each array when all lie one after another, then the end of the last one."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + math.ceil(array.size / _ALIGNMENT) * _ALIGNMENT)
    return starts


# The seam of devices: all that a step needs of a device, except operators.


def is_apart(device: torch.device) -> bool:
    """Whether the device has memory of its own."""
    return device.type == "cuda"


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory().to(device, non_blocking=True)


def _fetched(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _recorded_event() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event
