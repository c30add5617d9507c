"""Counts of requests (`RequestTelemetry`), and of the adapters and clients that are asked for most (`AdapterUsage`)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from multilora_engine.histogram import Histogram
from multilora_engine.lora.names import TaskId
from multilora_engine.request import TokenOutput

_REMEMBERED_PER_PLACE = 16
"""How many adapters are counted to find the ones most asked for."""

_LEAD = 2
"""An adapter needs this many times the requests of the last place to take it, so that places do not flap."""


@dataclass
class Usage:
    """The number of requests that ended, and of the tokens of their prompts and answers."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens


MAX_ADAPTERS = 32
"""How many adapters have metrics of their own. A metrics system keeps a series for each."""


class AdapterUsage:
    """Counts `max_adapters` adapters one by one and the rest together.

    Nothing is ever counted twice and no count ever falls, as counters of a metrics system must not. An adapter that
    takes the place of another starts at zero there: its earlier counts are in `other`, which only grows.
    """

    def __init__(self, max_adapters: int = MAX_ADAPTERS) -> None:
        self.other = Usage()
        self.max_adapters = max_adapters
        self._by_label: dict[str, Usage] = {}
        self._popularity: OrderedDict[str, int] = OrderedDict()

    @property
    def by_label(self) -> dict[str, Usage]:
        """The adapters with a place."""
        return dict(self._by_label)

    def record(self, label: str, prompt_tokens: int, output_tokens: int) -> None:
        """Count a request of an adapter that has ended."""
        self._popularity[label] = self._popularity.pop(label, 0) + 1
        usage = self._by_label.get(label) or self._new_place(label) or self.other
        usage.add(prompt_tokens, output_tokens)
        self._forget_unpopular()

    def _new_place(self, label: str) -> Usage | None:
        """Give an adapter a place, if one is free or if the last place is asked for much less."""
        if not self.max_adapters:
            return None
        if len(self._by_label) == self.max_adapters:
            last = min(self._by_label, key=self._popularity.__getitem__)
            if self._popularity[label] < _LEAD * self._popularity[last]:
                return None
            del self._by_label[last]
        return self._by_label.setdefault(label, Usage())

    def _forget_unpopular(self) -> None:
        """If there are too many adapters without a place, drop the one that was asked for longest ago."""
        if len(self._popularity) > _REMEMBERED_PER_PLACE * self.max_adapters:
            without_place = (label for label in self._popularity if label not in self._by_label)
            del self._popularity[next(without_place)]


_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_NS = 1e-9


@dataclass
class RequestStats:
    """Counts since the engine started.

    requests: by how they ended: a finish reason, or the code of an error.
    queue_seconds: from arrival to the first step. first_token_seconds: from arrival to the first output.
    inter_token_seconds: between tokens. If a step brings several tokens of a request, its time is split among them.
    request_seconds: from arrival to the end. batch_size: the requests that got something from a step; batch_adapters:
    their different adapters.
    """

    requests: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    queue_seconds: Histogram = field(default_factory=Histogram)
    first_token_seconds: Histogram = field(default_factory=Histogram)
    inter_token_seconds: Histogram = field(default_factory=Histogram)
    request_seconds: Histogram = field(default_factory=Histogram)
    batch_size: Histogram = field(default_factory=lambda: Histogram(_SEQUENCES))
    batch_adapters: Histogram = field(default_factory=lambda: Histogram(_SEQUENCES))


@dataclass(slots=True)
class _Clock:
    adapter: TaskId | None
    arrived: float
    last_token: float | None = None


class RequestTelemetry:
    """The only writer of `RequestStats`. A request begins once, and then ends or is dropped once."""

    def __init__(self) -> None:
        self.stats = RequestStats()
        self._clocks: dict[str, _Clock] = {}

    def begin(self, request_id: str, adapter: TaskId | None = None) -> None:
        """Count a request that was accepted."""
        self._clocks[request_id] = _Clock(adapter, time.monotonic())

    def refuse(self, code: str, num_requests: int) -> None:
        """Count requests that were not accepted."""
        self._count(code, num_requests)

    def drop(self, request_id: str) -> None:
        """Count a request that ended without an output, because no client waits for it any more."""
        del self._clocks[request_id]
        self._count("cancelled", 1)

    def record(self, outputs: Sequence[TokenOutput]) -> None:
        """Count the outputs of one step, or of an end outside of steps, for requests that have begun."""
        now = time.monotonic()
        if adapters := [self._clocks[output.request_id].adapter for output in outputs if output.num_new_tokens > 0]:
            self.stats.batch_size.observe(len(adapters))
            self.stats.batch_adapters.observe(len(set(adapters) - {None}))
        for output in outputs:
            self._note_tokens(output, now)
            if output.is_final:
                self._end(output, now)

    def _note_tokens(self, output: TokenOutput, now: float) -> None:
        if not (num_tokens := output.num_new_tokens):
            return
        clock = self._clocks[output.request_id]
        self.stats.output_tokens += num_tokens
        if clock.last_token is None:
            self.stats.first_token_seconds.observe(now - clock.arrived)
        else:
            self.stats.inter_token_seconds.observe((now - clock.last_token) / num_tokens, num_tokens)
        clock.last_token = now

    def _end(self, output: TokenOutput, now: float) -> None:
        clock = self._clocks.pop(output.request_id)
        self.stats.prompt_tokens += output.num_prompt_tokens
        self.stats.request_seconds.observe(now - clock.arrived)
        if output.perf is not None and output.perf.first_scheduled_time_ns:
            waited_ns = output.perf.first_scheduled_time_ns - output.perf.arrival_time_ns
            self.stats.queue_seconds.observe(waited_ns * _NS)
        self._count(output.finish_reason or output.error_code or "", 1)

    def _count(self, outcome: str, num_requests: int) -> None:
        self.stats.requests[outcome] = self.stats.requests.get(outcome, 0) + num_requests
