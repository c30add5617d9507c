"""MemoryAhead against Linux' own report of the memory."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from multilora_kernels import HugePages, MemoryAhead, huge_pages

LAYERS, SLOTS, HEADS, HEAD_DIM = 3, 20_000, 3, 64
SLOT_BYTES = HEADS * HEAD_DIM * 4
STRIDE = (2 << 20) // SLOT_BYTES


def make_cache() -> torch.Tensor:
    return HugePages().zeros((LAYERS, SLOTS, HEADS, HEAD_DIM), torch.float32)


def resident_bytes(tensor: torch.Tensor) -> int:
    """The pages of the tensor that have memory, by the kernel's page map."""
    first, last = tensor.data_ptr() // 4096, (tensor.data_ptr() + tensor.nbytes - 1) // 4096
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(first * 8)
        entries = file.read((last - first + 1) * 8)
    return sum(entry >> 7 for entry in entries[7::8]) * 4096


def test_memory_is_taken_two_strides_ahead_of_its_use_in_all_layers() -> None:
    keys, values = make_cache(), make_cache()
    memory = MemoryAhead(keys, values)
    assert memory._num_taken == STRIDE
    memory.note_use(1)
    memory.wait()
    for used in (1, STRIDE, 3 * STRIDE + 5):
        memory.note_use(used)
        memory.wait()
        assert used + 2 * STRIDE <= memory._num_taken < used + 3 * STRIDE
        for layer in (*keys, *values):
            assert resident_bytes(layer[: memory._num_taken]) >= memory._num_taken * SLOT_BYTES
        assert resident_bytes(keys) <= LAYERS * (memory._num_taken * SLOT_BYTES + (6 << 20))


def test_all_of_it_is_taken_in_the_end_and_values_that_are_written_meanwhile_stay() -> None:
    keys, values = make_cache(), make_cache()
    memory = MemoryAhead(keys, values)
    for used in range(0, SLOTS + 1, 1_000):
        memory.note_use(used)
        keys[:, max(0, used - 1000) : used] = 7.0
        values[:, max(0, used - 1000) : used] = -7.0
    memory.take_all()
    assert memory._num_taken == SLOTS
    assert resident_bytes(keys) >= keys.nbytes
    assert (keys == 7.0).all()
    assert (values == -7.0).all()


def test_use_that_goes_back_takes_nothing() -> None:
    memory = MemoryAhead(make_cache())
    memory.note_use(2 * STRIDE)
    memory.wait()
    taken = memory._num_taken
    memory.note_use(5)
    memory.wait()
    assert memory._num_taken == taken


def test_a_linux_that_cannot_take_memory_ahead_has_all_of_it_taken_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(huge_pages, "populate", lambda _: False)
    keys = make_cache()
    memory = MemoryAhead(keys)
    assert memory._num_taken == SLOTS
    assert resident_bytes(keys) >= keys.nbytes
    assert "all of it is taken now" in caplog.text


def test_it_may_leave_that_memory_to_the_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "populate", lambda _: False)
    pages = make_cache()
    memory = MemoryAhead(pages, or_all=False)
    memory.note_use(SLOTS // 2)
    memory.wait()
    assert resident_bytes(pages) == 0


def test_memory_that_is_lacking_fails_the_start_and_later_only_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacking(_: torch.Tensor) -> bool:
        raise OSError(12, "no memory for 1 bytes")

    take: Callable[[torch.Tensor], bool] = huge_pages.populate
    monkeypatch.setattr(huge_pages, "populate", lacking)
    with pytest.raises(OSError, match="no memory"):
        MemoryAhead(make_cache())
    monkeypatch.setattr(huge_pages, "populate", take)
    memory = MemoryAhead(make_cache())
    monkeypatch.setattr(huge_pages, "populate", lacking)
    memory.note_use(STRIDE + 1)
    memory.wait()
    assert re.search("ahead of its use, steps do it from here on: .*no memory for 1 bytes", caplog.text)


def test_a_process_that_ends_while_memory_is_taken_does_not_abort() -> None:
    program = """
import torch
from multilora_kernels import MemoryAhead, huge_pages

huge_pages.HUGE_PAGE_BYTES = 1
huge_pages.populate = lambda memory: True
MemoryAhead(torch.empty(1, 1 << 17, 1)).note_use(1 << 17)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
