"""Ask a server many things at once, and note when each piece of each answer came.

An open loop sends each request when it is due, without waiting for earlier ones, and counts from the moment it was
due: the delay of requests that a slow server keeps from being sent is part of the result (no coordinated omission). A
closed loop has a fixed number of askers. Each waits for its answer before it asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise

from multilora_client.bench.workload import Job, poisson_arrivals
from multilora_client.client import AsyncClient
from multilora_client.errors import MultiloraClientError
from multilora_client.generation import Chunk


@dataclass(frozen=True)
class Load:
    """level: arrivals a second (open loop), or requests at once (closed loop)."""

    level: float
    is_open: bool

    def __str__(self) -> str:
        return f"{self.level:g}/s" if self.is_open else f"{self.level:g} at once"


@dataclass(frozen=True)
class Sample:
    """One request and its result. All times are seconds on the event loop's clock.

    due_s: when it should have been sent. piece_times_s: when each piece of the answer came.

    error: code, "" for none. reason: the error in words.
    """

    job: Job
    due_s: float
    sent_s: float
    piece_times_s: tuple[float, ...]
    done_s: float
    text: str
    num_input_tokens: int
    num_output_tokens: int
    error: str
    reason: str = ""

    @property
    def is_answered(self) -> bool:
        return not self.error

    @property
    def send_delay_s(self) -> float:
        """The seconds by which this client itself was late."""
        return self.sent_s - self.due_s

    @property
    def first_token_s(self) -> float:
        return self.piece_times_s[0] - self.due_s

    @property
    def latency_s(self) -> float:
        return self.done_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """The seconds between each piece and the next."""
        return [later - earlier for earlier, later in pairwise(self.piece_times_s)]


Ask = Callable[[Job, float], Awaitable[Sample]]
"""Sends a job that was due at a time."""

OnDone = Callable[[], None]
"""Is called for each job that has ended."""


def make_ask(client: AsyncClient, output_tokens: int, timeout_s: float | None) -> Ask:
    """An Ask whose streams are greedy and have exactly `output_tokens` tokens."""

    async def ask(job: Job, due_s: float) -> Sample:
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        pieces: list[Chunk] = []
        times: list[float] = []
        error = reason = ""
        chunks = client.stream(
            job.prompt, adapter=job.target.adapter, max_tokens=output_tokens, end_id=-1, timeout_s=timeout_s
        )
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    times.append(clock())
                    pieces.append(chunk)
        except MultiloraClientError as failure:
            error, reason = failure.code, str(failure)
        return Sample(
            job=job,
            due_s=due_s,
            sent_s=sent_s,
            piece_times_s=tuple(times),
            done_s=clock(),
            text="".join(piece.text for piece in pieces),
            num_input_tokens=(pieces[-1].num_input_tokens or 0) if pieces else 0,
            num_output_tokens=(pieces[-1].num_output_tokens or len(pieces)) if pieces else 0,
            error=error,
            reason=reason,
        )

    return ask


async def run_load(ask: Ask, jobs: Sequence[Job], load: Load, seed: int, on_done: OnDone) -> list[Sample]:
    """Send the jobs as the load says; an open loop's arrivals are Poisson's, drawn from `seed`."""
    if load.is_open:
        return await run_open(ask, jobs, poisson_arrivals(load.level, len(jobs), seed), on_done)
    return await run_closed(ask, jobs, int(load.level), on_done)


async def run_open(ask: Ask, jobs: Sequence[Job], arrivals_s: Sequence[float], on_done: OnDone) -> list[Sample]:
    """Send each job at its time, seconds from now. Returns the samples in the order of the jobs."""
    clock = asyncio.get_running_loop().time
    start_s = clock()

    async def send(job: Job, due_s: float) -> Sample:
        sample = await ask(job, due_s)
        on_done()
        return sample

    running = []
    async with asyncio.TaskGroup() as group:
        for job, arrival_s in zip(jobs, arrivals_s, strict=True):
            await asyncio.sleep(start_s + arrival_s - clock())
            running.append(group.create_task(send(job, start_s + arrival_s)))
    return [task.result() for task in running]


async def run_closed(ask: Ask, jobs: Sequence[Job], concurrency: int, on_done: OnDone) -> list[Sample]:
    """Send the jobs in turn, `concurrency` at any time. Returns the samples in the order of their ends."""
    clock = asyncio.get_running_loop().time
    remaining = iter(jobs)
    samples: list[Sample] = []

    async def work() -> None:
        for job in remaining:
            samples.append(await ask(job, clock()))
            on_done()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return samples
