"""Which function computes each operator on a GPU: the one place where that is decided, for the whole process.

It is a kernel of `cuda`, until `serve_slower` puts another in its place, as the self-test does with an operator that it
has found wrong on this device, if it may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_slower: dict[str, Callable[..., Any]] = {}


def gpu_operator(name: str) -> Callable[..., Any]:
    """The function that serves an operator of `cuda.__all__`, with the arguments that it has there."""
    # Imported here: Triton comes with the CUDA builds of torch only.
    from multilora_kernels import cuda

    return _slower.get(name) or getattr(cuda, name)


def serve_slower(name: str, function: Callable[..., Any]) -> None:
    """Have a function, of the same arguments and results, serve in the place of a kernel from now on."""
    _slower[name] = function


def slower_operators() -> list[str]:
    """The operators that kernels of `cuda` do not serve, sorted by name."""
    return sorted(_slower)
