"""How many adapters one client may be sending at once. A front holds the weights of each until the engine has them.

A client is the tenant of an API key, or who a proxy says. Without both, all clients count as one: Triton tells a model
nothing of who asks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from multilora_engine.errors import TooManyUploads
from multilora_engine.process.client import Listener
from multilora_engine.request import TokenOutput


class Uploads:
    """The adapters under way through one front. Any thread may begin or end one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()

    def begin(self, client: str, limit: int) -> Callable[[], None]:
        """What ends the upload, to be called once. Raises TooManyUploads."""
        with self._lock:
            if self._under_way[client] >= limit:
                raise TooManyUploads(self._under_way[client])
            self._under_way[client] += 1
        return lambda: self._end(client)

    def _end(self, client: str) -> None:
        with self._lock:
            self._under_way[client] -= 1
            if not self._under_way[client]:
                del self._under_way[client]


class UploadListener:
    """Hands outputs on; the first one means that the engine has the adapter, or never will."""

    def __init__(self, listener: Listener, end_upload: Callable[[], None]) -> None:
        self._listener = listener
        self._end_upload: Callable[[], None] | None = end_upload

    def on_output(self, output: TokenOutput) -> None:
        if self._end_upload is not None:
            self._end_upload()
            self._end_upload = None
        self._listener.on_output(output)

    def flush(self) -> None:
        self._listener.flush()

    def is_cancelled(self) -> bool:
        return self._listener.is_cancelled()
