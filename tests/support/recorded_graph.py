"""A CUDA graph without a GPU: operators are noted as they run, and a replay calls them again on that memory.

As on a GPU, a replay runs no Python of the engine: numbers that the host put into an operator's arguments stay as they
were, and results lie where they lay.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from multilora_kernels import LoRATables, PagedSequences, cpu, cuda, reference

Change = Callable[[Any], Any]
"""What a replay reads in place of an argument, for graphs with a fault. Tables and sequences are one argument each."""


class _Recorder(TorchDispatchMode):
    """Notes torch's operators, and each of ours as one call whatever it is made of."""

    def __init__(self, change: Change | None = None) -> None:
        super().__init__()
        self._change = change
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._patches = ExitStack()
        self._is_in_ours = False

    def __enter__(self) -> Self:
        for module in (cuda, reference):
            for name in module.__all__:
                self._patches.enter_context(patch.object(module, name, self._noted(getattr(module, name))))
        if (library := cpu.compiled_library()) is not None:
            noted = {name: self._noted(value) if callable(value) else value for name, value in vars(library).items()}
            self._patches.enter_context(patch.object(cpu, "_library", lambda: SimpleNamespace(**noted)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if not self._is_in_ours:
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def _noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_ours:
                return function(*args, **kwargs)
            self._is_in_ours = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._is_in_ours = False
            self.calls.append((function, args, kwargs, result))
            return result

        return note

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            if self._change is not None:
                args = tree_map(
                    self._change, args, is_leaf=lambda value: isinstance(value, PagedSequences | LoRATables)
                )
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class RecordedPieces:
    """Captures one piece after the other, as `piecewise_graphs.Pieces` does."""

    def __init__(self, change: Change | None = None) -> None:
        self._change = change
        self._recorder = _Recorder()

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> None:
        self._recorder = _Recorder(self._change)
        self._recorder.__enter__()

    def end(self) -> Callable[[], None]:
        self._recorder.__exit__(None, None, None)
        return self._recorder.replay


def record(run: Callable[[], None], change: Change | None = None) -> Callable[[], None]:
    """Run a function once. Returns its replay."""
    with (recorder := _Recorder(change)):
        run()

    return recorder.replay
