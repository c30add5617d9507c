"""Answers as OpenAI shapes them: whole, or as server-sent events."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, ClassVar

from multilora_client.errors import Cancelled, MultiloraClientError
from multilora_client.messages import Alternative, Answer, Chunk, Generation
from multilora_client.openai.errors import failure_of
from multilora_client.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs

_DONE = "data: [DONE]\n\n"


class Reply(ABC):
    """The answer to one request. Its `system_fingerprint` is the server's digest of the adapter that wrote it."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    def __init__(self, model: str, request_id: str, includes_logprobs: bool) -> None:
        self._includes_logprobs = includes_logprobs
        self._head = {"id": f"{self.id_prefix}-{request_id}", "created": int(time.time()), "model": model}

    @abstractmethod
    def _whole(self, text: str) -> dict[str, Any]:
        """What a choice says all the text with."""

    @abstractmethod
    def _piece(self, text: str) -> dict[str, Any]:
        """What a streamed choice says a piece of the text with; "" at the end."""

    @abstractmethod
    def _opening(self) -> list[dict[str, Any]]:
        """What a stream says before any text."""

    @abstractmethod
    def _logprobs(self, answer: Alternative | Answer, offsets: TextOffsets) -> dict[str, Any]:
        """How likely the tokens of an answer, or of a piece of it, were."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """Raises Cancelled when the answer was ended from elsewhere: a part must not look like the whole."""
        choices = [
            _choice(
                self._whole(answer.text),
                _finish_reason(answer.finish_reason, generation.request_id),
                index,
                self._logprobs(answer, TextOffsets()) if self._includes_logprobs else None,
            )
            for index, answer in enumerate(generation.alternatives)
        ]
        num_tokens = sum(answer.num_output_tokens or 0 for answer in generation.alternatives)
        usage = _usage(generation.num_input_tokens, num_tokens)
        return self._body(self.object_name, choices, generation) | {"usage": usage}

    async def events(
        self, first: Chunk, rest: AsyncGenerator[Chunk, None], *, includes_usage: bool
    ) -> AsyncGenerator[str, None]:
        """Server-sent events. An error in their midst is the last of them: no [DONE] follows it."""

        offsets = TextOffsets()

        def pieces(chunk: Chunk) -> Iterator[str]:
            """An event, if there is something to say; tokens may come after the last of their text."""
            logprobs = self._logprobs(chunk, offsets) if self._includes_logprobs and chunk.tokens else None
            if chunk.text or logprobs:
                yield event(chunk, _choice(self._piece(chunk.text), None, logprobs=logprobs))

        def event(answer: Answer, *choices: dict[str, Any], usage: dict[str, int] | None = None) -> str:
            body = self._body(self.chunk_object_name, list(choices), answer)
            return _event(body | {"usage": usage} if includes_usage else body)

        try:
            async with aclosing(rest):
                for opening in self._opening():
                    yield event(first, _choice(opening, None))
                last = first
                for piece in pieces(first):
                    yield piece
                async for last in rest:
                    for piece in pieces(last):
                        yield piece
            yield event(last, _choice(self._piece(""), _finish_reason(last.finish_reason, last.request_id)))
            if includes_usage:
                yield event(last, usage=_usage(last.num_input_tokens, last.num_output_tokens))
            yield _DONE
        except MultiloraClientError as error:
            yield _event(failure_of(error).body)

    def _body(self, object_name: str, choices: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        return {
            **self._head,
            "object": object_name,
            "choices": choices,
            "system_fingerprint": answer.lora_digest or None,
        }


class ChatReply(Reply):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _opening(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def _logprobs(self, answer: Alternative | Answer, offsets: TextOffsets) -> dict[str, Any]:
        return chat_logprobs(answer)


class CompletionReply(Reply):
    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _opening(self) -> list[dict[str, Any]]:
        return []

    def _logprobs(self, answer: Alternative | Answer, offsets: TextOffsets) -> dict[str, Any]:
        return completion_logprobs(answer, offsets)


def _choice(
    content: dict[str, Any], finish_reason: str | None, index: int = 0, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _finish_reason(reason: str | None, request_id: str) -> str:
    """`stop` and `length` mean the same on both sides."""
    if reason not in ("stop", "length"):
        raise Cancelled("the request was ended before its answer was complete", request_id=request_id)
    return reason


def _usage(num_input_tokens: int | None, num_output_tokens: int | None) -> dict[str, int]:
    prompt, completion = num_input_tokens or 0, num_output_tokens or 0
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
