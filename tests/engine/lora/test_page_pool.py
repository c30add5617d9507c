"""Host memory that is locked for a GPU's copies, without a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from multilora_engine.errors import ConfigError
from multilora_engine.lora.free_pages import PagePool
from multilora_wire.layout import PageShape

PAGE_BYTES = 3 << 12


class FakeDriver:
    """Locks no more than 20 pages, and no memory of which a part is locked.

    calls: in their order. locked: bytes of each piece of memory, by its address. is_failed: the next launch fails for
    an error of a call before it.
    """

    cudaError = SimpleNamespace(success=0)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.locked: dict[int, int] = {}
        self.is_failed = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        self.calls.append("lock")
        if any(address < start + size and start < address + num_bytes for start, size in self.locked.items()):
            return self._fail(712)
        if num_bytes > 20 * PAGE_BYTES:
            return self._fail(2)
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unlock")
        # The memory is there still.
        ctypes.string_at(address, self.locked[address])
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def zeros(self, size: int, device: str) -> None:
        """As a launch of torch ends."""
        assert device == "cuda"
        self.calls.append("launch")
        is_failed, self.is_failed = self.is_failed, False
        if is_failed:
            raise RuntimeError("CUDA error")

    def _fail(self, code: int) -> int:
        self.is_failed = True
        return code


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.synchronize)
    monkeypatch.setattr(torch, "zeros", driver.zeros)
    return driver


def locked_pool(num_pages: int) -> PagePool:
    return PagePool(num_pages, PAGE_BYTES, torch.device("cpu"), pin_memory=True)


def test_the_pages_are_locked_and_not_a_byte_more(driver: FakeDriver) -> None:
    pool = locked_pool(17)
    assert driver.locked == {pool.storage.data_ptr(): 17 * PAGE_BYTES}
    assert pool.storage.data_ptr() % 4096 == 0
    assert pool.storage.shape == (17, PAGE_BYTES)
    assert not pool.storage.any()


def test_the_pages_are_unlocked_after_all_copies_when_the_last_view_of_them_is_gone(driver: FakeDriver) -> None:
    pool = locked_pool(17)
    (page,) = pool.views([16])
    with torch.inference_mode():
        part = page[5:9]
    del pool, page
    part.fill_(3)
    assert driver.calls == ["lock"]
    del part
    assert driver.calls == ["lock", "synchronize", "unlock"]
    assert not driver.locked
    # The next engine's, at the same addresses perhaps.
    pool = locked_pool(17)
    assert list(driver.locked) == [pool.storage.data_ptr()]


def test_memory_that_the_driver_does_not_lock_refuses_to_load_with_the_numbers(driver: FakeDriver) -> None:
    with pytest.raises(
        ConfigError, match=f"{21 * PAGE_BYTES} bytes .*error 2.*; write a smaller lora_cache_host_memory_bytes"
    ):
        locked_pool(21)
    # Whoever launches next is not told of it.
    assert not driver.is_failed
    assert driver.calls == ["lock", "launch"]


def test_a_cpu_locks_nothing(driver: FakeDriver) -> None:
    PagePool(17, PAGE_BYTES, torch.device("cpu"))
    assert not driver.calls


def test_memory_of_pages_is_there_before_an_adapter_comes(caplog: pytest.LogCaptureFixture) -> None:
    """64 MiB ahead of the pages in use, and none for the rest of the pool."""
    pool = PagePool(400, 1 << 20, torch.device("cpu"))
    assert pool.memory is not None
    for num_used in (0, 80, 160):
        if num_used:
            assert max(pool.allocate(PageShape(80, ()))) == num_used - 1
        pool.memory.wait()
        assert num_used + 64 <= pool.memory._num_taken <= num_used + 68
    assert not caplog.records
