"""Memory for the tensors that every step reads, in huge pages where Linux has them.

A step reads every weight once from one end to the other, and the keys and adapters of its sequences. The processor's
prefetchers stop at the end of a page. Each page's address must be looked up, on a virtual machine twice. Memory from
malloc for a weight of some megabytes begins in the middle of a huge page, so that most or all of it is small pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
from pathlib import Path

import torch

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGE_BYTES = 1 << 21
"""The unit in which Linux takes memory for `HugePages`."""

_SLAB_BYTES = 1 << 26
"""Address space that is reserved at a time; memory is taken as it is written to."""
_CACHE_LINE_BYTES = 64

_MADV_POPULATE_WRITE = 23
"""Takes memory for pages as writing to them would, and changes nothing in them. Linux has it since 5.14."""


def are_switched_off(setting: Path = _SETTING) -> bool:
    """Whether Linux has huge pages but gives them to nobody, not even on request."""
    return setting.exists() and "[never]" in setting.read_text()


def populate(memory: torch.Tensor) -> bool:
    """Have Linux give a tensor of `HugePages` its memory now. Its values stay, and other threads may use it meanwhile.

    The GIL is free meanwhile. Returns whether this Linux can do so. Raises OSError if memory is lacking.
    """
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = memory.data_ptr() + memory.nbytes - start
    if _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(number, f"no memory for {size} bytes: {os.strerror(number)}")


def give_back(memory: torch.Tensor) -> None:
    """Have Linux take back the memory of a tensor on a CPU, whose values are lost: they are zero, or as they were.

    memory: contiguous, and from malloc or an anonymous map, as torch and NumPy make it.
    """
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0:
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class HugePages:
    """Zeroed CPU tensors, one after another in slabs. A slab's memory goes back when its last tensor is gone."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `shape` that begins at a cache line. Raises MemoryError if memory is lacking."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._slab) - self._used:
            self._slab, self._used = _slab(num_bytes), 0
        start = self._used
        self._used += _rounded_up(num_bytes, _CACHE_LINE_BYTES)
        return self._slab[start : start + num_bytes].view(dtype).view(shape)


def _slab(num_bytes: int) -> torch.Tensor:
    """At least `num_bytes` zero bytes that begin at a huge page. Raises MemoryError."""
    size = _rounded_up(max(num_bytes, _SLAB_BYTES), HUGE_PAGE_BYTES)
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"{size / (1 << 20):.0f} MiB for weights, KV cache or adapters: {error.strerror}; the machine, or a limit "
            "of this process (ulimit -v), does not have them"
        ) from error
    # Linux may be built without huge pages.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    return everything[-everything.data_ptr() % HUGE_PAGE_BYTES :][:size]


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
