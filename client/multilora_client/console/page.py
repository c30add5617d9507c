"""The files of the page, and the application over them and the routes."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from multilora_client.console.guard import Guard
from multilora_client.console.routes import adapters, asking, live, uploads
from multilora_client.console.settings import ConsoleSettings
from multilora_client.openai.failure_answers import answer_failures

PATH = "/console"
FILES = Path(__file__).parent / "static"


def console_routes(settings: ConsoleSettings) -> list[BaseRoute]:
    """The console at PATH, and `/`, which leads there, for an application whose state has a `console`."""
    return [Route("/", _lead_to_the_page), Mount(PATH, _make_page(settings))]


def _make_page(settings: ConsoleSettings) -> FastAPI:
    app = FastAPI(title="multilora console", openapi_url=None)
    app.add_middleware(Guard, hosts=settings.hosts, max_upload_bytes=settings.max_upload_bytes)
    for routes in (adapters, asking, live, uploads):
        app.include_router(routes.router)
    answer_failures(app)
    app.mount("/", StaticFiles(directory=FILES, html=True))
    return app


async def _lead_to_the_page(_: Request) -> Response:
    return RedirectResponse(f"{PATH.removeprefix('/')}/")
