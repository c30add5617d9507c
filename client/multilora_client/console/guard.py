"""`Guard`: takes only requests of the console's own page, and tells browsers to run nothing but its files.

A browser sends requests to the loopback for any page that it shows. Such a page has another origin, or has its own name
lead to this machine (DNS rebinding), and then sends that name as `Host`.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multilora_client.openai.body_limit import BodyLimit
from multilora_client.openai.errors import Failure

HEADER = "x-multilora-console"
"""A header that the page sends with each request, and that no page of another origin can send without asking first."""

API = "/api/"
UPLOADS = "/api/uploads"

MAX_JSON_BYTES = 1 << 20
"""The longest request that is no upload."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_RESPONSE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), clipboard-read=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """ASGI middleware around the whole console."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], max_upload_bytes: int) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._small = BodyLimit(app, MAX_JSON_BYTES)
        self._large = BodyLimit(app, max_upload_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_RESPONSE_HEADERS)
                headers["Cache-Control"] = "no-store" if path.startswith(API) else "no-cache"
            await send(message)

        try:
            self._check(path, Headers(scope=scope))
        except Failure as failure:
            return await JSONResponse(failure.body, failure.status)(scope, receive, guarded)
        app = self._large if path == UPLOADS else self._small
        return await app(scope, receive, guarded)

    def _check(self, path: str, headers: Headers) -> None:
        """Raises Failure (403, 421)."""
        host = headers.get("host", "")
        if not self._is_known(host):
            raise Failure(
                421,
                f"the console is not reached by the name {host!r}; its operator can allow the name by --allow-host",
                "unknown_host",
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise Failure(403, f"a page of {origin!r} may not ask the console", "wrong_origin")
        if not path.startswith(API):
            return
        if headers.get("sec-fetch-site", "same-origin") != "same-origin" or HEADER not in headers:
            raise Failure(
                403,
                f"only the console's own page may ask: {path} takes requests of its origin with the header {HEADER}",
                "wrong_origin",
            )

    def _is_known(self, host: str) -> bool:
        """Whether the console may be called so: a name of its own, or an address, which no name can lead to."""
        name = _without_port(host).lower()
        return name == "localhost" or name in self._hosts or _is_address(name)


def _without_port(host: str) -> str:
    """`localhost` of `localhost:9100`, `::1` of `[::1]:9100`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
