"""/health, /ping, /version and /metrics: for the people who run the front, as vLLM has them."""

from __future__ import annotations

from importlib.metadata import version

import httpx2
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from multilora_client.openai.errors import Failure
from multilora_client.openai.front import OpenaiFront, Operator, TheFront
from multilora_client.openai.routes.reading import reads

router = APIRouter()
_PATIENCE_S = 5.0
"""The seconds to wait for the server's metrics: Prometheus gives up not much later."""


@reads(router, "/health")
@reads(router, "/ping")
@router.post("/ping")
async def tell_health(front: TheFront) -> Response:
    """Whether the front's server answers. Only the status tells."""
    await front.check_server()
    return Response()


@reads(router, "/version")
async def tell_version() -> JSONResponse:
    return JSONResponse({"version": version("multilora-client")})


@reads(router, "/metrics")
async def tell_metrics(_: Operator, front: TheFront) -> PlainTextResponse:
    """The metrics in Prometheus' text format: the front's own, and the server's if the operator says where they are."""
    text = front.metrics.exposition()
    if front.settings.server_metrics_url:
        text += await _server_metrics(front)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def _server_metrics(front: OpenaiFront) -> str:
    """The server's metrics. Raises Failure (502): half of the metrics would look like a server that does nothing."""
    try:
        async with httpx2.AsyncClient(timeout=_PATIENCE_S) as http:
            answer = await http.get(front.settings.server_metrics_url)
            return answer.raise_for_status().text
    except httpx2.HTTPError as error:
        raise Failure(502, f"the server's metrics cannot be read: {error}", "unavailable") from error
