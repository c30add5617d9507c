"""`PagePool`: a fixed amount of memory cut into pages of one size."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterable

import torch

from multilora_engine.errors import ConfigError
from multilora_engine.lora.free_pages import FreePages
from multilora_kernels import HugePages, MemoryAhead
from multilora_kernels.huge_pages import HUGE_PAGE_BYTES
from multilora_wire.layout import PageShape

_AHEAD_BYTES = 64 << 20
"""Memory that is taken before it is used: some adapters that arrive one right after the other."""


class PagePool(FreePages):
    """`storage` is uint8 [count, page_bytes]: page p is row p, so consecutive pages are consecutive memory.

    memory: of a CPU's pages, taken ahead of their use; None for a GPU's, and for pages that are locked for its copies.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device, pin_memory: bool = False) -> None:
        super().__init__(num_pages)
        self.page_bytes = page_bytes
        shape = (num_pages, page_bytes)
        self.storage = (
            HugePages().zeros(shape, torch.uint8)
            if device.type == "cpu"
            else torch.empty(shape, dtype=torch.uint8, device=device)
        )
        self.memory: MemoryAhead | None = None
        if pin_memory:
            self.storage = _pinned(self.storage)
        elif device.type == "cpu" and self.storage.nbytes:
            num_strides = _AHEAD_BYTES // HUGE_PAGE_BYTES
            self.memory = MemoryAhead(self.storage[None], num_strides_ahead=num_strides, or_all=False)
            self.memory.note_use(0)

    def allocate(self, shape: PageShape) -> list[int]:
        pages = super().allocate(shape)
        if self.memory is not None:
            self.memory.note_use(max(pages, default=-1) + 1)
        return pages

    def views(self, pages: Iterable[int]) -> list[torch.Tensor]:
        """Pages themselves, uint8 [page_bytes] each."""
        return [self.storage[page] for page in pages]


def _pinned(memory: torch.Tensor) -> torch.Tensor:
    """The same memory locked in its place, so that a GPU copies from it by itself. Raises ConfigError.

    torch's own pinned memory is rounded up to a power of two bytes: 33 GiB would take 64. It stays locked until the
    last view of a page is gone, and only then goes back to the system, whose next memory may have the same addresses.
    """
    cudart = torch.cuda.cudart()
    result = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if result != cudart.cudaError.success:
        _forget_error()
        raise ConfigError(
            f"{memory.nbytes} bytes of host memory cannot be locked for the GPU's copies "
            f"({cudart.cudaGetErrorString(result)}); write a smaller lora_cache_host_memory_bytes"
        )
    # Views of a tensor hold its storage, and that holds this; a tensor itself may go before its views.
    lent = (ctypes.c_ubyte * memory.nbytes).from_address(memory.data_ptr())
    weakref.finalize(lent, _unlock, memory).atexit = False
    return torch.frombuffer(lent, dtype=memory.dtype).view(memory.shape)


def _unlock(memory: torch.Tensor) -> None:
    # A copy from it that was begun may not have ended.
    torch.cuda.synchronize()
    cudart = torch.cuda.cudart()
    result = cudart.cudaHostUnregister(memory.data_ptr())
    assert result == cudart.cudaError.success, cudart.cudaGetErrorString(result)


def _forget_error() -> None:
    """Have CUDA forget the error of a call: the next launch of torch would fail for it.

    torch forgets it when a launch of its own has failed for it, and has no other way; so that launch is made here.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
