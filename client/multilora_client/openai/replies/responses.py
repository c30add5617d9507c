"""The answer of /v1/responses: its body, and the events that tell how it came about."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

from multilora_client.errors import Cancelled, MultiloraClientError
from multilora_client.generation import Alternative, Answer, Chunk, Generation
from multilora_client.openai.replies.events import named_event
from multilora_client.openai.replies.logprobs import chat_logprobs, spell_text
from multilora_client.openai.replies.output_items import Event, OutputItems
from multilora_client.openai.replies.usage import Usage
from multilora_client.openai.schemas.responses import ResponsesRequest
from multilora_client.openai.tools.calls import AnswerParser
from multilora_client.openai.tools.formats import ToolFormat
from multilora_client.openai.tools.reasoning import ReasoningName


class ResponsesReply:
    """The answer to one request; it has one prompt and one choice."""

    def __init__(
        self, request: ResponsesRequest, request_id: str, tool_format: ToolFormat | None, reasoning: ReasoningName
    ) -> None:
        """tool_format: how the model writes calls unless it is guided; None to leave them in the text."""
        self.usage = Usage()
        self._request = request
        self._chat = request.chat()
        self._tool_format = tool_format
        self._reasoning = reasoning
        self._parser: AnswerParser | None = None
        self._items = OutputItems(request_id)
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": int(time.time())}

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The body. Raises Cancelled when the answer was ended from elsewhere: a part must not look like the whole."""
        (generation,) = generations
        self._see(generation)
        reason = _checked_reason(generation.finish_reason)
        for _ in self._events_of(generation, is_last=True):
            pass  # their sum is in the items
        return self._ended_body(reason)

    async def events(self, chunks: AsyncGenerator[tuple[int, Chunk], None]) -> AsyncGenerator[str, None]:
        """Named and numbered events. An error in their midst is in the last of them."""
        number = count()
        try:
            async with aclosing(chunks):
                for event in self._opening():
                    yield named_event(event | {"sequence_number": next(number)})
                reason: str | None = None
                async for _, chunk in chunks:
                    self._see(chunk)
                    reason = chunk.finish_reason
                    for event in self._events_of(chunk, is_last=reason is not None):
                        yield named_event(event | {"sequence_number": next(number)})
            body = self._ended_body(_checked_reason(reason))
        except MultiloraClientError as error:
            body = self._failed_body(error)
        yield named_event({"type": f"response.{body['status']}", "response": body, "sequence_number": next(number)})

    def _see(self, answer: Generation | Chunk) -> None:
        self.usage.see(0, answer, [(0, answer)])

    def _opening(self) -> Iterator[Event]:
        body = self._body("in_progress")
        yield {"type": "response.created", "response": body}
        yield {"type": "response.in_progress", "response": body}

    def _events_of(self, part: Answer, is_last: bool) -> Iterator[Event]:
        """The events of a piece of the answer."""
        self._items.add_logprobs(self._logprobs(part))
        if self._parser is None:
            self._parser = self._chat.parser(self._tool_format, self._reasoning, part)
        for delta in self._parser.feed(part.text):
            yield from self._items.add(delta)
        if is_last:
            for delta in self._parser.finish():
                yield from self._items.add(delta)
            yield from self._items.finish(_status(part.finish_reason), not self._chat.tool_use.is_forced)

    def _logprobs(self, answer: Alternative | Answer) -> list[dict[str, Any]]:
        if not self._request.includes_logprobs:
            return []
        content: list[dict[str, Any]] = chat_logprobs(answer, spell_text)["content"]
        return content

    def _ended_body(self, reason: str) -> dict[str, Any]:
        body = self._body(_status(reason)) | {"output": self._items.items, "usage": self._usage()}
        return body | {"incomplete_details": {"reason": "max_output_tokens"}} if reason == "length" else body

    def _failed_body(self, error: MultiloraClientError) -> dict[str, Any]:
        told = {"code": "server_error", "message": str(error)}
        return self._body("failed") | {"output": self._items.items, "error": told}

    def _body(self, status: str) -> dict[str, Any]:
        """The body before there is any output; it has the request's fields, too."""
        request = self._request
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": request.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": request.temperature,
            "text": request.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": request.model_dump(include={"tool_choice"})["tool_choice"],
            "tools": [tool.model_dump() for tool in request.tools],
            "top_logprobs": request.top_logprobs,
            "top_p": request.top_p,
            "truncation": request.truncation,
            "usage": None,
            "user": request.user,
        }

    def _usage(self) -> dict[str, Any]:
        counts = self.usage.counts
        return {
            "input_tokens": counts.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.num_cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": counts.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts.num_prompt_tokens + counts.num_completion_tokens,
        }


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _checked_reason(reason: str | None) -> str:
    if reason not in ("stop", "length"):
        raise Cancelled("the request was ended before its answer was complete")
    return reason
