"""Which tests need a GPU, and what a busy machine may take."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from support.fronts import TIMEOUT_S

from multilora_engine.engine import accounts, guide_queue

collect_ignore = [] if torch.cuda.is_available() else ["test_gpu.py"]


@pytest.fixture(scope="session", autouse=True)
def limits_of_a_busy_machine() -> Iterator[None]:
    """Guides are compiled while the cores have nothing else to do, and the thread's own time is longer where caches are
    shared: a busy machine ends no request of a test that is about something else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guide_queue, "COMPILE_TIMEOUT_S", TIMEOUT_S)
        patch.setattr(accounts, "HOST_WORK_S", math.inf)
        yield
