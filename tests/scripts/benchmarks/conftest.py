"""Yardsticks of a machine that take no time: what tests look at does not depend on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import machine_limits


@pytest.fixture(autouse=True, scope="package")
def short_yardsticks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_limits, "CPU_FLOATS", 1 << 16)
        patch.setattr(machine_limits, "CPU_ROWS", 64)
        patch.setattr(machine_limits, "DOT_ROUNDS", 1000)
        yield
