"""/api/live: the figures that change all the time. /api/about: the figures that do not change."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from multilora_client.client import AsyncClient
from multilora_client.console.replies import json_reply
from multilora_client.console.state import TheClient, TheConsole
from multilora_client.errors import PermissionDenied

router = APIRouter()

MAX_EVENTS = 200
"""The latest events are told, and how many more there were."""


@router.get("/api/about")
async def tell_about(client: TheClient, console: TheConsole) -> Response:
    """The model, and what the page may do."""
    settings = console.settings
    return json_reply(
        {
            "model": await client.describe_model(),
            "is_read_only": settings.is_read_only,
            "max_upload_bytes": settings.max_upload_bytes,
            "urls": {"grpc": settings.server_url, "http": settings.http_url, "openai": settings.openai_url},
        }
    )


@router.get("/api/live")
async def tell_live(client: TheClient, since: Annotated[int, Query(ge=0)] = 0) -> Response:
    """The events after number `since`, and the server's statistics; null where the key may not see these."""
    events, stats = await asyncio.gather(client.adapter_events(since), _stats(client))
    latest = events.events[-MAX_EVENTS:]
    num_missed = events.num_missed + len(events.events) - len(latest)
    return json_reply({"events": latest, "last": events.last, "num_missed": num_missed, "stats": stats})


async def _stats(client: AsyncClient) -> dict[str, Any] | None:
    try:
        return await client.adapter_stats()
    except PermissionDenied:
        return None
