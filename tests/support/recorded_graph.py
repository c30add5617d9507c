"""A CUDA graph without a GPU: operators are noted as they run, and a replay calls them again on that memory.

As on a GPU, a replay runs no Python of the engine: numbers that the host put into an operator's arguments stay as they
were, and results lie where they lay. Work on the second stream runs as early, or as late, as its events allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from multilora_kernels import LoRATables, PagedSequences, cpu, cuda, reference, streams

Change = Callable[[Any], Any]
"""What a replay reads in place of an argument, for graphs with a fault. Tables and sequences are one argument each."""


@dataclass(eq=False)
class _Call:
    """A place in a stream. after: the event that it waits for."""

    run: Callable[[], None]
    after: _Call | None = None


class _Recorder(TorchDispatchMode):
    """Notes torch's operators, and each of ours as one call whatever it is made of."""

    def __init__(self, change: Change | None = None) -> None:
        super().__init__()
        self._change = change
        self.calls: tuple[list[_Call], list[_Call]] = ([], [])
        """Of the first stream, and of the second."""
        self._patches = ExitStack()
        self._is_in_ours = False
        self._stream = 0

    def __enter__(self) -> Self:
        for module in (cuda, reference):
            for name in module.__all__:
                self._patches.enter_context(patch.object(module, name, self._noted(getattr(module, name))))
        seam = {
            "_is_captured": lambda device: True,
            "_is_second": lambda device: self._stream == 1,
            "_on_second": lambda device: self._on_second(),
            "_recorded_event": self._recorded_event,
            "_wait": self._wait,
        }
        for name, function in seam.items():
            self._patches.enter_context(patch.object(streams, name, function))
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
            self._note(func, args, kwargs or {}, result)
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
            self._note(function, args, kwargs, result)
            return result

        return note

    def _note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        def again() -> None:
            changed = args
            if self._change is not None:
                changed = tree_map(
                    self._change, args, is_leaf=lambda value: isinstance(value, PagedSequences | LoRATables)
                )
            for old, new in zip(tree_leaves(result), tree_leaves(function(*changed, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.calls[self._stream].append(_Call(again))

    @contextmanager
    def _on_second(self) -> Iterator[None]:
        self._stream = 1
        try:
            yield
        finally:
            self._stream = 0

    def _recorded_event(self) -> _Call:
        event = _Call(lambda: None)
        self.calls[self._stream].append(event)
        return event

    def _wait(self, event: _Call) -> None:
        self.calls[self._stream].append(_Call(lambda: None, after=event))

    def replay(self, is_second_first: bool = True) -> None:
        """is_second_first: work of the second stream runs as early as its events allow, else as late."""
        queues, done = tuple(deque(calls) for calls in self.calls), set()
        order = (1, 0) if is_second_first else (0, 1)
        while any(queues):
            stream = next(s for s in order if queues[s] and (queues[s][0].after is None or queues[s][0].after in done))
            call = queues[stream].popleft()
            call.run()
            done.add(call)


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


def record(run: Callable[[], None], change: Change | None = None, is_second_first: bool = True) -> Callable[[], None]:
    """Run a function once. Returns its replay.

    is_second_first: the second stream runs as early as its events allow, else as late.
    """
    with (recorder := _Recorder(change)):
        run()

    return partial(recorder.replay, is_second_first)
