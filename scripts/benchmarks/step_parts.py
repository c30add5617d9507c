"""Where the time of a step goes: functions of the engine, timed by name, each without its calls of the others."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from multilora_engine.engine.engine import Engine
from multilora_engine.engine.scheduler import Scheduler
from multilora_engine.execution import model_runner
from multilora_engine.models import decoder, layers, linear
from multilora_engine.sampling import sampler

MODEL_PARTS = ("linears", "attention", "norms, rotary, activation")
"""The parts that a step computes on the device, apart from sampling; the other parts are its overhead."""

_PARTS: list[tuple[str, Any, str]] = [
    ("scheduling", Scheduler, "schedule"),
    ("batch", model_runner.ModelRunner, "build_batch"),
    ("linears", linear.LoRALinear, "forward"),
    ("linears", decoder.Decoder, "logits"),
    ("attention", decoder, "attention_plan"),
    ("attention", layers, "attend"),
    ("norms, rotary, activation", decoder.Decoder, "forward"),
    ("sampling", sampler.Choice, "__init__"),
    ("sampling", sampler.Choice, "read"),
    ("emission", Engine, "step"),
]
"""Part, where its function lies, and the function's name. A step's time outside of all others is emission."""

PARTS = tuple(dict.fromkeys(part for part, _, _ in _PARTS))


class Stopwatch:
    """seconds: the time of each part since the stopwatch was made."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts for `part` except for the time of timed functions inside it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.seconds[part] += seconds - self._inner.pop()
                if self._inner:
                    self._inner[-1] += seconds

        return call


@contextmanager
def timed_parts() -> Iterator[Stopwatch]:
    """Time the parts of all engines' steps; on leaving, everything is as before.

    Layers are computed part by part meanwhile, even where there is a kernel for whole ones.
    """
    stopwatch = Stopwatch()
    calls = ("decoder_layers", "decoder_logits")
    patches: list[Any] = [mock.patch.object(decoder, name, return_value=None) for name in calls]
    patches += [
        mock.patch.object(owner, name, stopwatch.timed(part, getattr(owner, name))) for part, owner, name in _PARTS
    ]
    try:
        for patch in patches:
            patch.start()
        yield stopwatch
    finally:
        for patch in patches:
            patch.stop()
