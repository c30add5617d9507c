"""Clients that count wrong answers: each owns an adapter of `telling_adapters`, asks it, cancels, unloads it, and
uploads its next version, which has another answer.

Nobody else touches a client's adapter, so that it knows what every request must bring.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from random import Random

from checkpoints.telling_adapters import BASE_TOKEN, MAX_RANK, PROMPT_TOKENS, answer
from gpu.served import Client, Served, client_of
from multilora_client.errors import MultiloraClientError
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from trials.judging_clients import Tally, text_of

STREAMED, WHOLE, CANCELLED, UPLOADS, UNLOADS = "streamed", "whole", "cancelled", "uploads", "unloads"
"""What a tally counts besides errors, by code. The first two are checked answers."""

_NOT_FOUND = "NOT_FOUND"
_MOST_PROMPT_TOKENS = 300
_LONG_ANSWER = 100
_SHARE_OF_REPLACED, _SHARE_OF_CANCELS, _SHARE_OF_BASE = 0.03, 0.07, 0.1


@dataclass(frozen=True)
class Work:
    """The work of the clients of one process. numbers: the adapters, one a client. goal: checked answers."""

    server: Served
    model: Path
    numbers: Sequence[int]
    goal: int
    seconds: float


def num_checked(tally: Tally) -> int:
    return tally.seen[STREAMED] + tally.seen[WHOLE]


def judge(work: Work) -> Tally:
    """Ask until there are as many checked answers as wanted, or the time is over."""
    return asyncio.run(_judge(work))


async def _judge(work: Work) -> Tally:
    tally, end = Tally(), time.monotonic() + work.seconds
    layout = checkpoint_layout(work.model, MAX_RANK, "float32")
    async with client_of(work.server, layout) as client, asyncio.TaskGroup() as group:
        for number in work.numbers:
            group.create_task(_Owner(client, number, tally).run(work.goal, end))
    return tally


class _Owner:
    def __init__(self, client: Client, number: int, tally: Tally) -> None:
        self._client, self._number, self._tally = client, number, tally
        self._version = 0
        self._is_there = False
        self._random = Random(number)

    async def run(self, goal: int, end: float) -> None:
        while num_checked(self._tally) < goal and time.monotonic() < end:
            try:
                await self._turn()
            except MultiloraClientError as error:
                self._tally.seen[error.code] += 1
                self._tally.messages.setdefault(error.code, str(error))

    async def _turn(self) -> None:
        draw = self._random.random()
        if not self._is_there:
            await self._client.upload(self._number, self._version)
            self._is_there = True
            self._tally.seen[UPLOADS] += 1
        elif draw < _SHARE_OF_REPLACED:
            await self._replace()
        elif draw < _SHARE_OF_REPLACED + _SHARE_OF_CANCELS:
            await self._cancel()
        else:
            is_base = draw < _SHARE_OF_REPLACED + _SHARE_OF_CANCELS + _SHARE_OF_BASE
            await self._ask(None if is_base else self._number)

    async def _ask(self, number: int | None) -> None:
        streams = self._random.random() < 0.5
        text, expected = "", self._expected(number)
        async with aclosing(self._client.ask(self._prompt(), len(expected), number, streams)) as pieces:
            async for piece in pieces:
                text += piece
        self._tally.seen[STREAMED if streams else WHOLE] += 1
        self._judge(number, text, text_of(expected))

    async def _cancel(self) -> None:
        number = self._random.choice((None, self._number))
        expected = self._expected(number)
        async with aclosing(self._client.ask(self._prompt(), len(expected), number, streams=True)) as pieces:
            async for piece in pieces:
                self._judge(number, piece, text_of(expected)[: len(piece)])
                break
        self._tally.seen[CANCELLED] += 1

    async def _replace(self) -> None:
        """Unload the adapter, which nobody must find then; its next version is uploaded in the next turn."""
        await self._client.unload(self._number)
        self._is_there = False
        self._tally.seen[UNLOADS] += 1
        self._version += 1
        try:
            async with aclosing(self._client.ask(self._prompt(), 1, self._number, streams=False)) as pieces:
                text = "".join([piece async for piece in pieces])
            self._tally.wrong.append(f"adapter {self._number} answered {text!r} after it was unloaded")
        except MultiloraClientError as error:
            if error.code != _NOT_FOUND:
                raise

    def _expected(self, number: int | None) -> list[int]:
        return [BASE_TOKEN] * _LONG_ANSWER if number is None else answer(number, self._version)

    def _prompt(self) -> list[int]:
        return self._random.choices(PROMPT_TOKENS, k=self._random.randint(1, _MOST_PROMPT_TOKENS))

    def _judge(self, number: int | None, text: str, expected: str) -> None:
        if text != expected:
            who = "the base model" if number is None else f"adapter {number} in version {self._version}"
            self._tally.wrong.append(f"{who} answered {text!r}, expected {expected!r}")
