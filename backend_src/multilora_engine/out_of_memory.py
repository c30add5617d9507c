"""`is_out_of_memory`: which of the many errors of a device and of its host mean that memory ran out."""

from __future__ import annotations

import re

import torch

_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate memory"
    r"|(?:CUDA error|CUDA driver error|Triton Error \[CUDA\]): out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
)
"""In the text of a RuntimeError: of torch's allocator for a CPU, of calls of CUDA and of Triton, and of cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of the host or of the device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    )
