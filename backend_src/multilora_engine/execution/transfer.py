"""Copies between host and device in every step, without waiting for the device: `to_device`, `FromDevice`."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor's values on `device`; on a CPU the tensor itself.

    A copy from pageable memory waits until the device has done its earlier work; one from pinned memory queues behind
    that. torch keeps the pinned memory until the copy is over.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class FromDevice:
    """A device tensor's values on their way to the host; on a CPU they are there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """The copy queues behind the device's earlier work; later work does not delay it."""
        self._values, self._arrived = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> torch.Tensor:
        """The values, as soon as they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
