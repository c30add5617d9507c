"""`EngineCalls`: requests to a worker's engine, whoever sent them to the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from multilora_engine.dynamo.streams import OpenStreams, OutputStream
from multilora_engine.errors import AdapterNotFound, RequestError
from multilora_engine.process.client import EngineClient
from multilora_engine.request import GenerationRequest, TokenOutput

Restore = Callable[[GenerationRequest], Awaitable[bool]]
"""Has the engine know the adapter of a request again; False if nobody has it."""


class EngineCalls:
    """call_id: the id that Dynamo gave the call, by which it is aborted."""

    def __init__(
        self, client: EngineClient, loop: asyncio.AbstractEventLoop, streams: OpenStreams, restore: Restore
    ) -> None:
        self._client = client
        self._loop = loop
        self._streams = streams
        self._restore = restore

    async def generate(
        self, asked: GenerationRequest, call_id: str, client_request_id: str, trace_id: str
    ) -> AsyncGenerator[TokenOutput | None, None]:
        """The outputs of a request; None at the end if nobody waits for it any more. Raises RequestError."""
        try:
            async with aclosing(self._try(asked, call_id, client_request_id, trace_id)) as outputs:
                async for output in outputs:
                    yield output
        except RequestError as error:
            # So a request is refused before its first output, if the engine has no tier with the adapter any more.
            if error.code != AdapterNotFound.code or not await self._restore(asked):
                raise
        else:
            return
        async with aclosing(self._try(asked, call_id, client_request_id, trace_id)) as outputs:
            async for output in outputs:
                yield output

    async def _try(
        self, asked: GenerationRequest, call_id: str, client_request_id: str, trace_id: str
    ) -> AsyncGenerator[TokenOutput | None, None]:
        with self._streams.opened(call_id, OutputStream(self._client, self._loop)) as stream:
            self._client.generate(stream, [asked], client_request_id, trace_id=trace_id)
            while not stream.is_cancelled():
                for output in await stream.next():
                    yield output
                    if output.is_final:
                        return
            yield None
