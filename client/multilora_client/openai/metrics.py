"""`FrontMetrics`: how many requests there were, how long they took, and how many tokens they used.

Labels are bounded: routes as they are declared and status codes; nothing that a client writes.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multilora_client.openai.replies.usage import TokenCounts

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_NO_ROUTE = "none"


class FrontMetrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Answered requests", ("route", "status"))
        self._running = Gauge(
            "multilora_openai_requests_running", "Requests that are being answered", registry=self._registry
        )
        self._seconds = Histogram(
            "multilora_openai_request_duration_seconds",
            "From a request's arrival to the last byte of its answer",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self._cached_tokens = self._counter("cached_prompt_tokens", "Tokens of prompts that were computed before")
        self._completion_tokens = self._counter("completion_tokens", "Tokens of answers")

    def begin_request(self) -> None:
        self._running.inc()

    def end_request(self, route: str, status: int, seconds: float) -> None:
        self._running.dec()
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_tokens(self, counts: TokenCounts) -> None:
        self._prompt_tokens.inc(counts.num_prompt_tokens)
        self._cached_tokens.inc(counts.num_cached_tokens or 0)
        self._completion_tokens.inc(counts.num_completion_tokens)

    def exposition(self) -> str:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def _counter(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"multilora_openai_{name}", documentation, labels, registry=self._registry)


class MeasuredRequests:
    """ASGI middleware that tells FrontMetrics of every request; a request without an answer counts as status 500."""

    def __init__(self, app: ASGIApp, metrics: FrontMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, start = 500, time.monotonic()

        async def measured(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        self._metrics.begin_request()
        try:
            await self._app(scope, receive, measured)
        finally:
            route = getattr(scope.get("route"), "path", _NO_ROUTE)
            self._metrics.end_request(route, status, time.monotonic() - start)
        return None
