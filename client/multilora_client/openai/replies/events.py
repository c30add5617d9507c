"""Server-sent events, and the streams that become them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Send

T = TypeVar("T")

DONE = "data: [DONE]\n\n"


def event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def named_event(body: Mapping[str, Any]) -> str:
    """An event that also has its `type` outside of the body."""
    return f"event: {body['type']}\n{event(body)}"


async def started(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same items, once there is a first one. Raises the error that comes in its place."""
    first = await anext(items)

    async def all_items() -> AsyncGenerator[T, None]:
        async with aclosing(items):
            yield first
            async for item in items:
                yield item

    return all_items()


class EventStream(StreamingResponse):
    """Server-sent events whose generator is closed at once when the client hangs up, which cancels the generation."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)
