"""`BodyLimit`: refuses a request body once it is too long, regardless of its headers."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware. The application's own handler answers with status 413; at most `max_bytes` are held.

    beside: the beginning of paths that have limits of their own.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, beside: str | None = None) -> None:
        self._app = app
        self._beside = beside
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._beside is not None and scope.get("path", "").startswith(self._beside):
            return await self._app(scope, receive, send)
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, f"the request's body has more than {self._max_bytes} bytes")
            return message

        return await self._app(scope, limited, send)
