"""The HTTP application over one AsyncClient: its routes, its middleware, and how errors are answered."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from multilora_client.client import AsyncClient
from multilora_client.console import page
from multilora_client.console.state import Console, FindClient, header_key
from multilora_client.openai.body_limit import BodyLimit
from multilora_client.openai.catalogue import Catalogue
from multilora_client.openai.failure_answers import answer_failures, failure_answer
from multilora_client.openai.front import FrontState, OpenaiFront
from multilora_client.openai.metrics import FrontMetrics, MeasuredRequests
from multilora_client.openai.routes import adapters, generation, models, service, tokenization
from multilora_client.openai.routes.absent import not_served, wrong_method
from multilora_client.openai.settings import FrontSettings

_DEFAULT_SETTINGS = FrontSettings()


def make_app(
    catalogue: Catalogue, connect: Callable[[], AsyncClient], settings: FrontSettings = _DEFAULT_SETTINGS
) -> FastAPI:
    """The application. `connect` makes the client, in the event loop that uses it."""
    metrics = FrontMetrics()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[FrontState]:
        async with connect() as client:
            front = OpenaiFront(client, catalogue, settings, metrics, started_s=int(time.time()))
            yield (
                {"front": front}
                if settings.console is None
                else {
                    "front": front,
                    "console": Console(_find_console_client(front), settings.console),
                }
            )

    app = FastAPI(
        title="multilora",
        lifespan=lifespan,
        redoc_url=None,
        openapi_url="/openapi.json" if settings.has_docs else None,
        redirect_slashes=False,
    )
    app.add_middleware(
        BodyLimit, max_bytes=settings.max_body_bytes, beside=f"{page.PATH}/" if settings.console else None
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(MeasuredRequests, metrics=metrics)
    for routes in (adapters, generation, models, service, tokenization):
        app.include_router(routes.router)
    if settings.console:
        app.router.routes.extend(page.console_routes(settings.console))
    answer_failures(app)
    app.add_exception_handler(404, _answer_not_served)
    app.add_exception_handler(405, _answer_wrong_method)
    return app


def _find_console_client(front: OpenaiFront) -> FindClient:
    """Where the front has keys that the server does not know, the console is for those who run the server."""

    def find_client(authorization: str | None) -> AsyncClient:
        granted = front.catalogue.access(authorization)
        if granted.caller is None:
            return front.client.with_api_key(header_key(authorization))
        if not granted.key:
            granted.check_operator()
        return front.client_of(granted)

    return find_client


async def _answer_not_served(request: Request, _: Exception) -> Response:
    return failure_answer(not_served(request))


async def _answer_wrong_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return failure_answer(wrong_method(request, error.headers))
