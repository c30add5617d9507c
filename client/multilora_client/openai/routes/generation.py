"""/v1/chat/completions, /v1/completions and /v1/responses."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from multilora_client.generation import Chunk, Generation
from multilora_client.openai.asking import Inquiry, traceparent_of, unless_gone
from multilora_client.openai.catalogue import Access, NamedModel
from multilora_client.openai.errors import Failure, quoted
from multilora_client.openai.front import Caller, OpenaiFront, TheFront
from multilora_client.openai.questions import Question
from multilora_client.openai.replies.chat import ChatReply
from multilora_client.openai.replies.completion import CompletionReply
from multilora_client.openai.replies.events import EventStream, started
from multilora_client.openai.replies.responses import ResponsesReply
from multilora_client.openai.replies.usage import Usage
from multilora_client.openai.schemas.chat import ChatRequest
from multilora_client.openai.schemas.completion import CompletionRequest
from multilora_client.openai.schemas.responses import ResponsesRequest
from multilora_client.openai.schemas.sampling import Sampling
from multilora_client.openai.tools.formats import TOOL_FORMATS

router = APIRouter()


class _Asked(Protocol):
    """A request that asks questions."""

    stream: bool


class _Reply(Protocol):
    """The reply that their answers become."""

    usage: Usage

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]: ...

    def events(self, chunks: AsyncGenerator[tuple[int, Chunk], None]) -> AsyncGenerator[str, None]: ...


@router.post("/v1/chat/completions", response_model=None)
async def complete_chat(body: ChatRequest, request: Request, caller: Caller, front: TheFront) -> Response:
    inquiry = await _inquiry(_model(body, caller, front), request, caller, front)
    settings = front.settings
    tool_format = TOOL_FORMATS.get(settings.tool_call_parser)
    reply = ChatReply(body, inquiry.request_id, tool_format, settings.reasoning_parser)
    return await _answer(body, body.questions(settings.reasoning_parser), inquiry, reply, request, front)


@router.post("/v1/completions", response_model=None)
async def complete(body: CompletionRequest, request: Request, caller: Caller, front: TheFront) -> Response:
    inquiry = await _inquiry(_model(body, caller, front), request, caller, front)
    if body.echo and (await front.describe_model(caller)).has_encoder:
        raise Failure(
            400, "echo: the model has an encoder, and no answer continues the prompt", "unsupported_value", "echo"
        )
    return await _answer(body, body.questions(), inquiry, CompletionReply(body, inquiry.request_id), request, front)


@router.post("/v1/responses", response_model=None)
async def respond(body: ResponsesRequest, request: Request, caller: Caller, front: TheFront) -> Response:
    inquiry = await _inquiry(caller.model(body.model), request, caller, front)
    settings = front.settings
    tool_format = TOOL_FORMATS.get(settings.tool_call_parser)
    reply = ResponsesReply(body, inquiry.request_id, tool_format, settings.reasoning_parser)
    return await _answer(body, body.questions(settings.reasoning_parser), inquiry, reply, request, front)


def _model(body: Sampling, caller: Access, front: OpenaiFront) -> NamedModel:
    """The model that a request names. Of two names, one may be the base model's: `lora_path` then is an adapter of it.

    Raises Failure (400) for two different adapters, and as `Access.model` does.
    """
    if body.lora_path in (None, body.model):
        return caller.model(body.model)
    if body.model != front.catalogue.base:
        names = f"model is {quoted(body.model)} and lora_path is {quoted(body.lora_path)}"
        raise Failure(400, f"{names}: they name two models", "invalid_value", "lora_path")
    return caller.model(body.lora_path, "lora_path")


async def _inquiry(model: NamedModel, request: Request, caller: Caller, front: OpenaiFront) -> Inquiry:
    if model.name == front.catalogue.base:
        await front.check_base(caller)
    name = front.name_of(caller, request.client.host if request.client else "")
    return Inquiry(front.client_of(caller), model, uuid.uuid4().hex, traceparent_of(request), name)


async def _answer(
    asked: _Asked, questions: list[Question], inquiry: Inquiry, reply: _Reply, request: Request, front: OpenaiFront
) -> Response:
    """Ask the server. A stream starts to answer with its first piece, so that an earlier failure has its own status."""
    if not asked.stream:
        body = reply.whole(await unless_gone(request, inquiry.generations(questions)))
        front.metrics.count_tokens(reply.usage.counts)
        return JSONResponse(body)
    chunks = await unless_gone(request, started(inquiry.chunks(questions)))
    return EventStream(_counted(reply, chunks, front))


async def _counted(
    reply: _Reply, chunks: AsyncGenerator[tuple[int, Chunk], None], front: OpenaiFront
) -> AsyncGenerator[str, None]:
    """The events of a reply, whose tokens count even when the client leaves in their midst."""
    try:
        async with aclosing(reply.events(chunks)) as events:
            async for event in events:
                yield event
    finally:
        front.metrics.count_tokens(reply.usage.counts)
