"""The HTTP application: /v1/models, /v1/chat/completions and /v1/completions over one AsyncClient."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, TypedDict, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Send

from multilora_client.client import AsyncClient
from multilora_client.errors import MultiloraClientError
from multilora_client.messages import is_traceparent
from multilora_client.openai.body_limit import BodyLimit
from multilora_client.openai.catalogue import Access, Catalogue
from multilora_client.openai.errors import Failure, failure_of, invalid_body
from multilora_client.openai.limits import MAX_BODY_BYTES
from multilora_client.openai.replies import ChatReply, CompletionReply, Reply
from multilora_client.openai.schemas import ChatRequest, CompletionRequest

T = TypeVar("T")


class State(TypedDict):
    """What every request finds in `request.state`."""

    client: AsyncClient
    catalogue: Catalogue


def make_app(
    catalogue: Catalogue,
    connect: Callable[[], AsyncClient],
    max_body_bytes: int = MAX_BODY_BYTES,
    has_docs: bool = False,
) -> FastAPI:
    """The application. `connect` makes the client, in the event loop that uses it.

    has_docs: whether it describes itself at /docs and /openapi.json, to whoever asks.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[State]:
        async with connect() as client:
            yield {"client": client, "catalogue": catalogue}

    app = FastAPI(
        title="multilora", lifespan=lifespan, redoc_url=None, openapi_url="/openapi.json" if has_docs else None
    )
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.include_router(router, prefix="/v1")
    app.add_exception_handler(Failure, _answer_failure)
    app.add_exception_handler(MultiloraClientError, _answer_failure)
    app.add_exception_handler(RequestValidationError, _answer_failure)
    app.add_exception_handler(HTTPException, _answer_failure)
    app.add_exception_handler(Exception, _answer_failure)
    return app


def _access(request: Request) -> Access:
    catalogue: Catalogue = request.state.catalogue
    return catalogue.access(request.headers.get("authorization"))


Caller = Annotated[Access, Depends(_access)]
router = APIRouter()


@router.get("/models")
async def list_models(caller: Caller) -> dict[str, Any]:
    """The models that the caller may use: the base model and every adapter."""
    return {"object": "list", "data": [_model(name) for name in caller.names]}


@router.get("/models/{name:path}")
async def retrieve_model(name: str, caller: Caller) -> dict[str, Any]:
    caller.adapter(name)
    return _model(name)


@router.post("/chat/completions", response_model=None)
async def complete_chat(body: ChatRequest, request: Request, caller: Caller) -> Response:
    return await _generate(body, request, caller, ChatReply)


@router.post("/completions", response_model=None)
async def complete(body: CompletionRequest, request: Request, caller: Caller) -> Response:
    return await _generate(body, request, caller, CompletionReply)


async def _generate(
    body: ChatRequest | CompletionRequest, request: Request, caller: Access, reply_class: type[Reply]
) -> Response:
    """Ask the server. A stream starts to answer with its first piece, so that what fails before has its own status."""
    client: AsyncClient = request.state.client
    adapter, request_id = caller.adapter(body.model), uuid.uuid4().hex
    reply, options = reply_class(body.model, request_id, body.includes_logprobs), body.options()
    options["request_id"] = request_id
    options["traceparent"] = _traceparent(request)
    if not body.stream:
        answer = await _unless_gone(request, client.generate(body.text, adapter=adapter, **options))
        return JSONResponse(reply.whole(answer))
    chunks = client.stream(body.text, adapter=adapter, **options)
    first = await _unless_gone(request, anext(chunks))
    return EventStream(reply.events(first, chunks, includes_usage=body.includes_usage))


def _traceparent(request: Request) -> str | None:
    """The caller's trace; a malformed one counts as none, as W3C has it."""
    given = request.headers.get("traceparent", "")
    return given if is_traceparent(given) else None


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
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


class EventStream(StreamingResponse):
    """Server-sent events whose generator is closed at once when the client hangs up, which cancels the generation."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "multilora"}


async def _answer_failure(_: Request, error: Exception) -> Response:
    failure = _failure(error)
    headers = {"WWW-Authenticate": "Bearer"} if failure.status == 401 else None
    return JSONResponse(failure.body, failure.status, headers)


def _failure(error: Exception) -> Failure:
    match error:
        case Failure():
            return error
        case MultiloraClientError():
            return failure_of(error)
        case RequestValidationError():
            return invalid_body(error.errors()[0])
        case HTTPException():
            return Failure(error.status_code, error.detail, "invalid_request")
        case _:
            return Failure(500, "internal error; the log says more", "internal")
