"""A device that fails when a test says so, in the place of the seam between host and device (`batch/transfer`).

Its memory is the host's, and its kernels are those of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from multilora_engine.batch import transfer
from multilora_engine.execution.model_runner import ModelRunner

ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"
NO_MEMORY = (
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
)
"""Of calls that have no exception of their own for it."""

Place = Literal["send", "step", "fetch", "read"]
"""A copy to the device, the launch of a step, a copy from the device, or the wait for that."""


class FaultyDevice:
    """Works until `fail`. num_failed: calls that have failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All CPU tensors are on the device from now on."""
        self.num_failed = 0
        self._place: Place | None = None
        self._error: Exception | None = None
        self._is_sticky = False
        device = self

        class Event:
            def synchronize(self) -> None:
                device.call("read")

        monkeypatch.setattr(transfer, "is_apart", lambda device: True)
        monkeypatch.setattr(transfer, "_sent", self._calls_first("send", lambda tensor, device: tensor.clone()))
        monkeypatch.setattr(transfer, "_fetched", self._calls_first("fetch", torch.clone))
        monkeypatch.setattr(transfer, "_recorded_event", Event)
        monkeypatch.setattr(ModelRunner, "_forward", self._calls_first("step", ModelRunner._forward))

    def fail(self, place: Place, error: Exception, is_sticky: bool = False) -> None:
        """The next call of a place raises; if the error is sticky, every call after it, too."""
        self._place, self._error, self._is_sticky = place, error, is_sticky

    def call(self, place: Place) -> None:
        if self._error is None or self._place not in (place, None):
            return
        error, self.num_failed, self._place = self._error, self.num_failed + 1, None
        if not self._is_sticky:
            self._error = None
        raise error

    def _calls_first(self, place: Place, work: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            self.call(place)
            return work(*arguments, **options)

        return called
