"""`Reply`: the parts that chats and completions share, whole or as server-sent events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from multilora_client.errors import Cancelled, MultiloraClientError
from multilora_client.generation import Alternative, Answer, Chunk, Generation
from multilora_client.openai.errors import failure_of
from multilora_client.openai.replies.events import DONE, event
from multilora_client.openai.replies.usage import Usage
from multilora_client.openai.schemas.sampling import Sampling

Content = dict[str, Any]
"""The content of a choice, without its index and finish_reason."""


class Choice(ABC):
    """One choice of an answer, whole or piece by piece."""

    @abstractmethod
    def whole(self, answer: Alternative, generation: Generation) -> Content: ...

    @abstractmethod
    def opening(self, first: Answer) -> Iterator[Content]:
        """The contents of a stream before any of the answer."""

    @abstractmethod
    def pieces(self, chunk: Chunk) -> Iterator[Content]:
        """The contents of a chunk, none for an empty chunk."""

    @abstractmethod
    def closing(self) -> Iterator[Content]:
        """The contents that are left at the end; the last one goes with the finish_reason."""

    def finish_reason(self, reason: str) -> str:
        """`stop` and `length` mean the same on both sides."""
        return reason


class Reply(ABC):
    """The answer to one request. Its `system_fingerprint` is the server's digest of the adapter that wrote it."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    def __init__(self, request: Sampling, request_id: str, num_prompts: int) -> None:
        self.usage = Usage()
        self._request = request
        self._num_choices = num_prompts * request.n
        identity = request.answer_id or request_id
        self._head = {"id": f"{self.id_prefix}-{identity}", "created": int(time.time()), "model": request.model}

    @abstractmethod
    def _choice(self, prompt_index: int, first: Answer) -> Choice:
        """A choice of the prompt with this number, before any of its answer. first: the answer, or its first piece."""

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The body, of one generation a prompt.

        Raises Cancelled when an answer was ended from elsewhere: a part must not look like the whole.
        """
        choices = [
            self._whole_choice(prompt_index, index, answer, generation)
            for prompt_index, generation in enumerate(generations)
            for index, answer in enumerate(generation.alternatives, start=prompt_index * self._request.n)
        ]
        for prompt_index, generation in enumerate(generations):
            first_index = prompt_index * self._request.n
            self.usage.see(prompt_index, generation, enumerate(generation.alternatives, first_index))
        return self._body(self.object_name, choices, generations[0]) | {"usage": self.usage.body()}

    async def events(self, chunks: AsyncGenerator[tuple[int, Chunk], None]) -> AsyncGenerator[str, None]:
        """Server-sent events, of chunks with the numbers of their prompts.

        An error in their midst is the last of them: no [DONE] follows it.
        """
        try:
            choices: dict[int, Choice] = {}
            num_open = self._num_choices
            async with aclosing(chunks):
                async for prompt_index, chunk in chunks:
                    num_open -= chunk.finish_reason is not None
                    index = prompt_index * self._request.n + chunk.sequence_index
                    self.usage.see(prompt_index, chunk, [(index, chunk)])
                    for choice in self._events_of(prompt_index, index, chunk, choices):
                        yield event(self._chunk_body(chunk, choice))
            if num_open:
                raise _cancelled()
            if self._request.includes_usage:
                yield event(self._body(self.chunk_object_name, [], chunk) | {"usage": self.usage.body()})
            yield DONE
        except MultiloraClientError as error:
            yield event(failure_of(error).body)

    def _events_of(
        self, prompt_index: int, index: int, chunk: Chunk, choices: dict[int, Choice]
    ) -> Iterator[dict[str, Any]]:
        """The bodies of a chunk's choices. choices: the choices that have begun."""
        contents: list[Content] = []
        if index not in choices:
            choices[index] = self._choice(prompt_index, chunk)
            contents += choices[index].opening(chunk)
        choice = choices[index]
        for content in (*contents, *choice.pieces(chunk)):
            yield _choice_body(content, index)
        if chunk.finish_reason is not None:
            yield from self._end_of(choice, index, chunk)

    def _end_of(self, choice: Choice, index: int, chunk: Chunk) -> Iterator[dict[str, Any]]:
        *contents, last = choice.closing()
        for content in contents:
            yield _choice_body(content, index)
        yield _choice_body(last, index, choice.finish_reason(_checked_reason(chunk.finish_reason)))

    def _whole_choice(
        self, prompt_index: int, index: int, answer: Alternative, generation: Generation
    ) -> dict[str, Any]:
        choice = self._choice(prompt_index, generation)
        content = choice.whole(answer, generation)
        return _choice_body(content, index, choice.finish_reason(_checked_reason(answer.finish_reason)))

    def _chunk_body(self, chunk: Chunk, choice: dict[str, Any]) -> dict[str, Any]:
        body = self._body(self.chunk_object_name, [choice], chunk)
        if self._request.includes_running_usage:
            return body | {"usage": self.usage.body()}
        return body | {"usage": None} if self._request.includes_usage else body

    def _body(self, object_name: str, choices: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        return {
            **self._head,
            "object": object_name,
            "choices": choices,
            "system_fingerprint": answer.lora_digest or None,
        }


def _choice_body(content: Content, index: int, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "logprobs": None, **content, "finish_reason": finish_reason}


def _checked_reason(reason: str | None) -> str:
    if reason not in ("stop", "length"):
        raise _cancelled()
    return reason


def _cancelled() -> Cancelled:
    return Cancelled("the request was ended before its answer was complete")
