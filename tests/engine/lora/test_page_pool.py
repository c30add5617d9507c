"""Host memory that is locked for a GPU's copies, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from multilora_engine.errors import ConfigError
from multilora_engine.lora.page_pool import PagePool
from multilora_wire.layout import PageShape

PAGE_BYTES = 3 << 12


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Address and bytes of each piece of memory that the driver was asked to lock; it locks no more than 20 pages."""
    pieces: list[tuple[int, int]] = []

    def lock(address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        pieces.append((address, num_bytes))
        return 0 if num_bytes <= 20 * PAGE_BYTES else 2

    driver = SimpleNamespace(
        cudaHostRegister=lock, cudaError=SimpleNamespace(success=0), cudaGetErrorString=lambda code: f"error {code}"
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return pieces


def test_the_pages_are_locked_and_not_a_byte_more(locked: list[tuple[int, int]]) -> None:
    pool = PagePool(17, PAGE_BYTES, torch.device("cpu"), pin_memory=True)
    assert locked == [(pool.storage.data_ptr(), 17 * PAGE_BYTES)]
    assert pool.storage.data_ptr() % 4096 == 0


def test_memory_that_the_driver_does_not_lock_refuses_to_load_with_the_numbers(locked: list[tuple[int, int]]) -> None:
    with pytest.raises(
        ConfigError, match=f"{21 * PAGE_BYTES} bytes .*error 2.*; write a smaller lora_cache_host_memory_bytes"
    ):
        PagePool(21, PAGE_BYTES, torch.device("cpu"), pin_memory=True)


def test_a_cpu_locks_nothing(locked: list[tuple[int, int]]) -> None:
    PagePool(17, PAGE_BYTES, torch.device("cpu"))
    assert not locked


def test_memory_of_pages_is_there_before_an_adapter_comes(caplog: pytest.LogCaptureFixture) -> None:
    """64 MiB ahead of the pages in use, and none for the rest of the pool."""
    pool = PagePool(400, 1 << 20, torch.device("cpu"))
    assert pool.memory is not None
    for num_used in (0, 80, 160):
        if num_used:
            assert max(pool.allocate(PageShape(80, ()))) == num_used - 1
        pool.memory.wait()
        assert num_used + 64 <= pool.memory.num_taken <= num_used + 68
    assert not caplog.records
