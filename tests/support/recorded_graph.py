"""A CUDA graph without a GPU: torch's operators are noted as they run, and a replay calls them again on that memory.

As on a GPU, a replay runs no Python of the engine: numbers that the host put into an operator's arguments stay as they
were, and results lie where they lay.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class RecordedPieces:
    """Captures one piece after the other, as `piecewise_graphs.Pieces` does."""

    def __init__(self) -> None:
        self._recorder = _Recorder()

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> None:
        self._recorder = _Recorder()
        self._recorder.__enter__()

    def end(self) -> Callable[[], None]:
        self._recorder.__exit__(None, None, None)
        return self._recorder.replay


def record(run: Callable[[], None]) -> Callable[[], None]:
    """Run a function once. Returns its replay."""
    with (recorder := _Recorder()):
        run()

    return recorder.replay
