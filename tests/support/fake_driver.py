"""Triton on a machine without a GPU: kernels are noted and compiled for a target, and nothing launches them."""

from __future__ import annotations

from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGET = GPUTarget("cuda", 90, 32)

_DEVICE = 77
"""No machine has so many: kernels of real devices are kept apart."""


class _FakeDriver:
    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, device: Any) -> int:
        return 0


def set_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the test runs."""
    monkeypatch.setattr(driver, "_active", _FakeDriver())
