"""Marks functions whose result `torch.compile` may take for a constant."""

from __future__ import annotations

from collections.abc import Callable


def constant_result(function: Callable[[], bool]) -> Callable[[], bool]:
    """`torch.compiler.assume_constant_result` without its import of the whole compiler, a second of each start.

    Sets what that sets: torch/_dynamo/decorators.py. A compiled function calls `function` once, while it is traced.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
