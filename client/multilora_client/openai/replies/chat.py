"""The answer to a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from multilora_client.generation import Alternative, Answer, Chunk, Generation
from multilora_client.openai.replies.logprobs import chat_logprobs, prompt_logprobs, spell_id, spell_text
from multilora_client.openai.replies.reply import Choice, Content, Reply
from multilora_client.openai.schemas.chat import ChatRequest
from multilora_client.openai.tools.calls import (
    AnswerParser,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    join_calls,
    join_reasoning,
    join_text,
)
from multilora_client.openai.tools.formats import ToolFormat
from multilora_client.openai.tools.reasoning import ReasoningName


class ChatChoice(Choice):
    def __init__(self, request: ChatRequest, parser: AnswerParser) -> None:
        self._request = request
        self._parser = parser
        self._spelling = spell_id if request.return_tokens_as_token_ids else spell_text

    def whole(self, answer: Alternative, generation: Generation) -> Content:
        deltas = [*self._parser.feed(answer.text), *self._parser.finish()]
        text, calls, reasoning = join_text(deltas), join_calls(deltas), join_reasoning(deltas)
        content = text or None if calls or reasoning or self._request.tool_use.is_forced else text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [call_body(call) for call in calls]
        return {"message": message, "logprobs": self._logprobs(answer)}

    def opening(self, first: Answer) -> Iterator[Content]:
        yield {"delta": {"role": "assistant", "content": None if self._request.tool_use.is_forced else ""}}

    def pieces(self, chunk: Chunk) -> Iterator[Content]:
        logprobs = self._logprobs(chunk) if chunk.tokens else None
        deltas = [_delta_body(delta) for delta in self._parser.feed(chunk.text)]
        if logprobs and not deltas:
            deltas = [{}]  # tokens may come after the last of their text
        for place, delta in enumerate(deltas):
            yield {"delta": delta, "logprobs": None if place else logprobs}

    def closing(self) -> Iterator[Content]:
        for delta in self._parser.finish():
            yield {"delta": _delta_body(delta)}
        yield {"delta": {}}

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._parser.num_calls and reason == "stop" else reason

    def _logprobs(self, answer: Alternative | Answer) -> dict[str, Any] | None:
        return chat_logprobs(answer, self._spelling) if self._request.logprobs else None


class ChatReply(Reply):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self, request: ChatRequest, request_id: str, tool_format: ToolFormat | None, reasoning: ReasoningName
    ) -> None:
        """tool_format: how the model writes calls unless it is guided; None to leave them in the text."""
        super().__init__(request, request_id, num_prompts=1)
        self._chat = request
        self._tool_format = tool_format
        self._reasoning = reasoning

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        body = super().whole(generations)
        if self._chat.prompt_logprobs is not None and (prompt := generations[0].prompt):
            body["prompt_logprobs"] = prompt_logprobs(prompt, self._chat.prompt_logprobs)
        return body

    def _choice(self, prompt_index: int, first: Answer) -> Choice:
        return ChatChoice(self._chat, self._chat.parser(self._tool_format, self._reasoning, first))

    def _body(self, object_name: str, choices: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        body = super()._body(object_name, choices, answer)
        return body | {"service_tier": "default"} if self._chat.service_tier else body


def call_body(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _delta_body(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, TextDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text}
    head = {"id": delta.call_id, "type": "function"} if delta.call_id else {}
    name = {"name": delta.name} if delta.call_id else {}
    return {"tool_calls": [{"index": delta.index, **head, "function": {**name, "arguments": delta.arguments}}]}
