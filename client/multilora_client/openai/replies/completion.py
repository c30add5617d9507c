"""The answer to a completion: a text that continues each prompt, or the prompt and the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from multilora_client.generation import Alternative, Answer, Chunk, Generation, PromptTokens
from multilora_client.openai.replies.logprobs import (
    TextOffsets,
    completion_logprobs,
    joined_logprobs,
    prompt_logprobs,
    spell_id,
    spell_text,
)
from multilora_client.openai.replies.reply import Choice, Content, Reply
from multilora_client.openai.schemas.completion import CompletionRequest


class CompletionChoice(Choice):
    def __init__(self, request: CompletionRequest, prompt_text: str | None) -> None:
        """prompt_text: None where only the server knows it."""
        self._request = request
        self._prompt_text = prompt_text
        self._offsets = TextOffsets()
        self._spelling = spell_id if request.return_tokens_as_token_ids else spell_text

    def whole(self, answer: Alternative, generation: Generation) -> Content:
        content: Content = {"text": "", "logprobs": None}
        for part in (*self.opening(generation), {"text": answer.text, "logprobs": self._logprobs(answer)}):
            content["text"] += part["text"]
            content["logprobs"] = joined_logprobs(content["logprobs"], part["logprobs"])
        if self._request.prompt_logprobs is not None and generation.prompt:
            content["prompt_logprobs"] = prompt_logprobs(generation.prompt, self._request.prompt_logprobs)
        return content

    def opening(self, first: Answer) -> Iterator[Content]:
        if self._request.echo:
            yield {"text": self._echo(first), "logprobs": self._logprobs(first.prompt) if first.prompt else None}

    def pieces(self, chunk: Chunk) -> Iterator[Content]:
        logprobs = self._logprobs(chunk) if chunk.tokens else None
        if chunk.text or logprobs:  # tokens may come after the last of their text
            yield {"text": chunk.text, "logprobs": logprobs}

    def closing(self) -> Iterator[Content]:
        yield {"text": ""}

    def _echo(self, answer: Answer) -> str:
        if self._prompt_text is not None:
            return self._prompt_text
        tokens = answer.prompt.tokens if answer.prompt else []
        return b"".join(token for token, *_ in tokens).decode(errors="replace")

    def _logprobs(self, answer: Alternative | Answer | PromptTokens) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        return completion_logprobs(answer, self._offsets, self._request.logprobs, self._spelling)


class CompletionReply(Reply):
    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, request: CompletionRequest, request_id: str) -> None:
        super().__init__(request, request_id, len(request.prompt))
        self._completion = request

    def _choice(self, prompt_index: int, first: Answer) -> Choice:
        return CompletionChoice(self._completion, self._completion.text_of(prompt_index))
