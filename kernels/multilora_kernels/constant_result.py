"""The mark of a function that torch's compiler calls once, while it traces, and whose result it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_result(function: _Function) -> _Function:
    """Mark `function` as torch.compiler.assume_constant_result does.

    torch's own decorator imports the whole compiler to set this attribute: a third of the time that a process needs to
    import the engine.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
