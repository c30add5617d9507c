"""`OutputStream`: outputs of the engine, from its client's thread to an event loop; `OpenStreams`: all open ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from multilora_engine.errors import EngineUnavailable, RelayedError
from multilora_engine.process.client import EngineClient
from multilora_engine.process.messages import join_outputs
from multilora_engine.request import TokenOutput


class OutputStream:
    """The listener of a call that a coroutine of `loop` waits for.

    The client's thread writes `_heard`, and hands it over whole when it flushes; all else belongs to the loop's thread.
    `cancel` may be called there at any time: the client then ends the call, if it has not ended.
    """

    unsent_bytes = 0

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._heard: list[TokenOutput] = []
        self._waiting: list[TokenOutput] = []
        self._arrived = asyncio.Event()
        self._is_cancelled = False
        self._engine_is_gone = False

    def on_output(self, output: TokenOutput) -> None:
        self._heard.append(output)
        if output.error_code is not None and not self._client.has_engine:
            self._engine_is_gone = True

    def flush(self) -> None:
        heard, self._heard = self._heard, []
        self._loop.call_soon_threadsafe(self._take, heard)

    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> None:
        """End the call; nothing waits for it any more."""
        self._is_cancelled = True
        self._arrived.set()

    async def next(self) -> list[TokenOutput]:
        """The outputs since the last time, those of one request joined; nothing once it is cancelled.

        Raises the error of the call: EngineUnavailable for want of an engine, and any other RequestError as a
        RelayedError.
        """
        await self._arrived.wait()
        if not self._is_cancelled:
            self._arrived.clear()
        outputs, self._waiting = self._waiting, []
        return [] if self._is_cancelled else [self._checked(output) for output in join_outputs(outputs)]

    def _checked(self, output: TokenOutput) -> TokenOutput:
        if output.error_code is None:
            return output
        message = output.error_message or ""
        raise EngineUnavailable(message) if self._engine_is_gone else RelayedError(output.error_code, message)

    def _take(self, outputs: list[TokenOutput]) -> None:
        self._waiting += outputs
        self._arrived.set()


class OpenStreams:
    """The streams that coroutines wait for, by the ids that Dynamo gives their requests. All in one event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, OutputStream] = {}
        self._changed = asyncio.Event()

    @contextmanager
    def opened(self, request_id: str, stream: OutputStream) -> Iterator[OutputStream]:
        """Keep `stream` here while the block runs; the end of the block cancels it."""
        self._streams[request_id] = stream
        try:
            yield stream
        finally:
            stream.cancel()
            del self._streams[request_id]
            self._changed.set()

    def cancel(self, request_id: str) -> None:
        """Cancel a stream, if it is open."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.cancel()

    async def wait_closed(self, timeout_s: float) -> int:
        """Wait until no stream is open, or for `timeout_s`. Returns the number of streams still open."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._streams:
                    self._changed.clear()
                    await self._changed.wait()
        return len(self._streams)
