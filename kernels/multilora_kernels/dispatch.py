"""Which function computes an operator: a kernel of `cuda`, a function of the compiled CPU library, or the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from multilora_kernels import reference
from multilora_kernels.cpu import compiled_library
from multilora_kernels.interpreter import has_gpu_operators


def operator(name: str, x: torch.Tensor) -> Callable[..., Any]:
    """The function that computes an operator on the device of `x`. Its arguments depend on the device.

    On a GPU, and in Triton's interpreter, it is a kernel of `cuda`; on a CPU a compiled function; else the reference.
    """
    library = compiled_for(x)
    function = None if library is None else getattr(library, name, None)
    if function is None:
        function = gpu_operator(name) if has_gpu_operators(x.device) else getattr(reference, name)
    return function


def gpu_operator(name: str) -> Callable[..., Any]:
    """The kernel of `cuda` that has this name."""
    # Imported here: Triton comes with the CUDA builds of torch only.
    from multilora_kernels import cuda

    return getattr(cuda, name)  # type: ignore[no-any-return]


def compiled_for(x: torch.Tensor) -> ModuleType | None:
    """The compiled library if it computes on `x`: on a CPU, with a compiler. Else None."""
    return None if x.is_cuda else compiled_library()
