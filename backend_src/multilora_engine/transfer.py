"""`to_device`: what the host makes for the device in every step, sent without waiting for the device."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor's values on `device`; on a CPU the tensor itself.

    A copy from pageable memory waits until the device has done what it was given before; one from pinned memory queues
    behind that. torch keeps the pinned memory until the copy is over.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
