"""Memory that was freed and that malloc keeps for later: a process that has started may never need as much again."""

from __future__ import annotations

import ctypes
import gc


def give_back_free_memory() -> None:
    """Drop unreachable objects, and give free pages back to Linux, those in the middle of the heap, too.

    Where the C library has no `malloc_trim` (musl, which keeps few free pages), only the objects are dropped.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
