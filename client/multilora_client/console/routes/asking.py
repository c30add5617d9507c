"""/api/ask: the same question to several adapters at once, streamed side by side."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from multilora_client.client import AsyncClient
from multilora_client.console.replies import JsonLines, line
from multilora_client.console.routes.adapters import ById, ByName
from multilora_client.console.state import TheClient
from multilora_client.errors import MultiloraClientError
from multilora_client.generation import Chunk
from multilora_client.openai.concurrency import merged
from multilora_client.options import GenerateOptions

router = APIRouter()

MAX_TARGETS = 5
NUM_TOP_LOG_PROBS = 5


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Turn(_Strict):
    """One turn of a chat."""

    role: str
    content: str


class AskedTarget(_Strict):
    """One of those who are asked: an adapter, or None, which must be written: the base model.

    Exactly one of messages and prompt is given; each target has its own, since each has answered differently before.
    expected_digest: of the version that is meant.
    """

    adapter: ById | ByName | None
    expected_digest: str | None = None
    messages: list[Turn] | None = None
    prompt: str | None = None


class Options(_Strict):
    """The options of GenerateOptions that the page offers; the server checks their values."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop_words: list[str] | None = None


class AskRequest(_Strict):
    """wants_log_probs: whether the reply has the log-probs of each token and of the likeliest tokens."""

    targets: Annotated[list[AskedTarget], Field(min_length=1, max_length=MAX_TARGETS)]
    options: Options = Options()
    wants_log_probs: bool = False


@router.post("/api/ask")
async def ask(request: AskRequest, client: TheClient) -> Response:
    """Lines `{"column", "text", "tokens"}` as they come, and for each target one with `end` or with `error`."""
    return JsonLines(_answers(request, client))


async def _answers(request: AskRequest, client: AsyncClient) -> AsyncGenerator[str, None]:
    streams = [_answer(target, request, client) for target in request.targets]
    async with aclosing(merged(streams)) as pieces:
        async for column, piece in pieces:
            yield line({"column": column, **piece})


async def _answer(
    target: AskedTarget, request: AskRequest, client: AsyncClient
) -> AsyncGenerator[dict[str, Any], None]:
    """The pieces of one answer. An error is a piece, too: the other answers go on."""
    reader, start, first_token_s = TokenReader(), time.monotonic(), None
    try:
        async with aclosing(_stream(target, request, client)) as chunks:
            async for chunk in chunks:
                if first_token_s is None and chunk.num_output_tokens:
                    first_token_s = time.monotonic() - start
                if chunk.text or chunk.tokens:
                    yield {"text": chunk.text, "tokens": reader.read(chunk)}
                if chunk.is_final:
                    yield {"end": _end(chunk, first_token_s, time.monotonic() - start)}
    except MultiloraClientError as error:
        yield {"error": {"code": error.code, "message": str(error)}}


def _stream(target: AskedTarget, request: AskRequest, client: AsyncClient) -> AsyncGenerator[Chunk, None]:
    options = GenerateOptions(**request.options.model_dump())  # type: ignore[typeddict-item]
    if request.wants_log_probs:
        options |= GenerateOptions(return_log_probs=True, num_top_log_probs=NUM_TOP_LOG_PROBS)
    if target.messages is not None:
        options |= GenerateOptions(messages=[{"role": turn.role, "content": turn.content} for turn in target.messages])
    if isinstance(target.adapter, ByName):
        options |= GenerateOptions(lora_name=target.adapter.lora_name)
    if target.expected_digest is not None:
        options |= GenerateOptions(lora_expected_digest=target.expected_digest)
    task_id = target.adapter.lora_task_id if isinstance(target.adapter, ById) else None
    return client.stream(target.prompt, adapter=task_id, **options)


def _end(chunk: Chunk, first_token_s: float | None, seconds: float) -> dict[str, Any]:
    return {
        "finish_reason": chunk.finish_reason,
        "num_input_tokens": chunk.num_input_tokens,
        "num_output_tokens": chunk.num_output_tokens,
        "num_cached_tokens": chunk.num_cached_tokens,
        "lora_task_id": None if chunk.lora_task_id is None else str(chunk.lora_task_id),
        "lora_digest": chunk.lora_digest,
        "first_token_s": first_token_s,
        "seconds": seconds,
    }


class TokenReader:
    """Texts of the tokens of one answer. A character whose bytes are in several tokens comes with the last of them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Of each token its text, its log-prob, and the likeliest tokens in its place, best first."""
        return [
            {
                "text": self._decoder.decode(texts[0]),
                "log_prob": log_prob,
                "top": [
                    {"text": text.decode(errors="replace"), "log_prob": value}
                    for text, (_, value) in zip(texts[1:], top, strict=True)
                ],
            }
            for texts, log_prob, top in _rows(chunk)
        ]


def _rows(chunk: Chunk) -> Sequence[tuple[list[bytes], float, list[tuple[int, float]]]]:
    return list(zip(chunk.tokens, chunk.log_probs, chunk.top_log_probs, strict=True)) if chunk.tokens else []
