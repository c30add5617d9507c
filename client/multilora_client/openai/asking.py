"""`Inquiry`: one HTTP request is one question to the server or several, which are asked side by side."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request

from multilora_client.client import AsyncClient
from multilora_client.errors import InvalidRequest
from multilora_client.generation import Chunk, Generation
from multilora_client.messages import is_traceparent
from multilora_client.openai.catalogue import NamedModel
from multilora_client.openai.concurrency import gathered, merged
from multilora_client.openai.errors import Failure
from multilora_client.openai.questions import Question
from multilora_client.openai.tools.prompt import told_instead
from multilora_client.options import GenerateOptions

T = TypeVar("T")


@dataclass(frozen=True)
class Inquiry:
    """Questions to one model under one request id. One member of an alias answers them all.

    request_id: unique. If there are several questions, each adds its number to it. traceparent: None for no trace.
    on_behalf_of: the caller, for the server; empty where it is not told.
    """

    client: AsyncClient
    model: NamedModel
    request_id: str
    traceparent: str | None
    on_behalf_of: str = ""

    async def generations(self, questions: Sequence[Question]) -> list[Generation]:
        """Whole answers, in the questions' order. The first failure ends the others."""
        return await gathered(self._generation(question) for question in self._identified(questions))

    def chunks(self, questions: Sequence[Question]) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Pieces of answers as they come, each with the number of its question."""
        return merged([self._stream(question) for question in self._identified(questions)])

    async def _generation(self, question: Question) -> Generation:
        try:
            return await self.client.generate(question.prompt, adapter=self.model.adapter, **question.options)
        except InvalidRequest as error:
            return await self._generation(_with_tools_told(question, error))

    async def _stream(self, question: Question) -> AsyncGenerator[Chunk, None]:
        try:
            chunks = self.client.stream(question.prompt, adapter=self.model.adapter, **question.options)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        except InvalidRequest as error:
            async with aclosing(self._stream(_with_tools_told(question, error))) as chunks:
                async for chunk in chunks:
                    yield chunk

    def _identified(self, questions: Sequence[Question]) -> list[Question]:
        return [
            dataclasses.replace(question, options=question.options | self._identity(question, f"-{i}" if i else ""))
            for i, question in enumerate(questions)
        ]

    def _identity(self, question: Question, suffix: str) -> GenerateOptions:
        options = GenerateOptions(request_id=self.request_id + suffix, traceparent=self.traceparent)
        if self.on_behalf_of:
            options |= GenerateOptions(on_behalf_of=self.on_behalf_of)
        if self.model.lora_name is None:
            return options | GenerateOptions(lora_session=None)
        session = question.options.get("lora_session") or self.request_id
        return options | GenerateOptions(lora_name=self.model.lora_name, lora_session=session)


def traceparent_of(request: Request) -> str | None:
    """The caller's trace; a malformed one counts as none, as W3C has it."""
    given = request.headers.get("traceparent", "")
    return given if is_traceparent(given) else None


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up meanwhile; then raises Failure (499)."""
    result, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return result.result()
        raise Failure(499, "the client has hung up", "cancelled")
    finally:
        result.cancel()
        gone.cancel()
        await asyncio.wait((result, gone))


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _with_tools_told(question: Question, error: InvalidRequest) -> Question:
    """The question for a template without a place for tools. Raises any other error again."""
    messages = told_instead(question.tools_told, error)
    return Question(question.prompt, question.options | GenerateOptions(messages=messages, tools=None))
