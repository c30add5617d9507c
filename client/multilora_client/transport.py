"""The seam between the clients and the network: four methods, and a transport for tests that has no network.

The transports speak gRPC through tritonclient's generated stubs rather than through its InferenceServerClient, which
allows one stream per client object, and HTTP through httpx2, since tritonclient's HTTP client belongs to the thread
that made it and reads no event streams.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from typing import Protocol

from multilora_client.messages import InferRequest, Response

GRACE_S = 1.0
"""How much longer than the server a client waits for a request's deadline, so that the server's own answer arrives."""


class Transport(Protocol):
    """The blocking transport. Every failure is raised as a MultiloraClientError.

    streams_tensors: whether `stream` can carry adapters.
    `stream` yields responses in order; closing the iterator early cancels the request on the server.
    """

    @property
    def streams_tensors(self) -> bool: ...

    def infer(self, request: InferRequest) -> Response: ...

    def stream(self, request: InferRequest) -> Generator[Response, None, None]: ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """The transport for asyncio."""

    @property
    def streams_tensors(self) -> bool: ...

    async def infer(self, request: InferRequest) -> Response: ...

    def stream(self, request: InferRequest) -> AsyncGenerator[Response, None]: ...

    async def close(self) -> None: ...


Handler = Callable[[InferRequest], Iterable[Response]]


class MockTransport:
    """Answers from `handler` instead of a server; `infer` returns its first response. For tests, also users' own.

    >>> client = Client(transport=MockTransport(lambda request: [Response({"text_output": ["hello"]})]))
    >>> client.generate("hi").text
    'hello'
    """

    def __init__(self, handler: Handler, *, streams_tensors: bool = True) -> None:
        self.streams_tensors = streams_tensors
        self._handler = handler

    def infer(self, request: InferRequest) -> Response:
        return next(iter(self._handler(request)))

    def stream(self, request: InferRequest) -> Generator[Response, None, None]:
        yield from self._handler(request)

    def close(self) -> None:
        """There is nothing to close."""


class AsyncMockTransport:
    """MockTransport for AsyncClient."""

    def __init__(self, handler: Handler, *, streams_tensors: bool = True) -> None:
        self.streams_tensors = streams_tensors
        self._handler = handler

    async def infer(self, request: InferRequest) -> Response:
        return next(iter(self._handler(request)))

    async def stream(self, request: InferRequest) -> AsyncGenerator[Response, None]:
        for response in self._handler(request):
            yield response

    async def close(self) -> None:
        """There is nothing to close."""
