"""Minutes of load on a virtual clock, and servers that take their time by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import pytest
from support.virtual_time import run_in_virtual_time

from multilora_client import InferRequest, MultiloraClientError, Response
from multilora_client.bench.load import Sample
from multilora_client.bench.workload import Job, Target


@pytest.fixture
def run_virtual() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return run_in_virtual_time


class SlowTransport:
    """Streams answers of `num_pieces`, the first after `first_s` seconds, the others after `gap_s` each.

    capacity: requests it works on at once; others wait. error: what every request gets, instead.
    """

    streams_tensors = True

    def __init__(
        self,
        first_s: float = 1.0,
        gap_s: float = 0.5,
        num_pieces: int = 3,
        capacity: int = 1000,
        error: MultiloraClientError | None = None,
    ) -> None:
        self.sent_at: list[float] = []
        self.most_at_once = 0
        self._first_s, self._gap_s, self._num_pieces = first_s, gap_s, num_pieces
        self._room = asyncio.Semaphore(capacity)
        self._error = error
        self._num_running = 0

    async def infer(self, request: InferRequest) -> Response:
        return Response({}, is_final=True)

    async def stream(self, request: InferRequest) -> AsyncGenerator[Response, None]:
        self.sent_at.append(asyncio.get_running_loop().time())
        self._num_running += 1
        self.most_at_once = max(self.most_at_once, self._num_running)
        try:
            if self._error:
                raise self._error
            async with self._room:
                for number in range(self._num_pieces):
                    await asyncio.sleep(self._gap_s if number else self._first_s)
                    outputs = {
                        "text_output": [f"{number} "],
                        "num_input_tokens": [5],
                        "num_output_tokens_so_far": [number + 1],
                    }
                    yield Response(outputs, is_final=number == self._num_pieces - 1)
        finally:
            self._num_running -= 1

    async def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture
def slow_transport() -> type[SlowTransport]:
    return SlowTransport


_JOB = Job(Target(), "a prompt")


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    """An answered request that was due and sent at `due_s`; times relative to that."""

    def make(
        first_s: float = 0.1,
        gaps_s: Sequence[float] = (),
        due_s: float = 0.0,
        text: str = "hello",
        error: str = "",
        job: Job = _JOB,
    ) -> Sample:
        times = [due_s + first_s]
        for gap in gaps_s:
            times.append(times[-1] + gap)
        return Sample(job, due_s, due_s, () if error else tuple(times), times[-1], text, 5, len(times), error)

    return make
