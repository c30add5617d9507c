"""`Uploads`: how many adapters clients may be sending at once. A front holds their weights until the engine has them.

A known client is the tenant of an API key, or named by a proxy. Such a client may send
`CallLimits.max_uploads_per_client` adapters at once. Triton tells a model nothing of the connection, so unknown clients
cannot be counted one by one. They share the bytes that one known client may hold, the same number times
`lora_max_adapter_bytes`: adapters of usual sizes from many clients fit, and the memory of the front has the same bound.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import TooManyUploadBytes, TooManyUploads, Unavailable
from multilora_engine.request import Sender


class InFlight:
    """Amounts that are under way, by the owner that they are charged to. Any thread may begin or end one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts: Counter[str] = Counter()

    def begin(
        self, owner: str, amount: int, limit: int, too_much: Callable[[int, int], Unavailable]
    ) -> Callable[[], None]:
        """The function that gives `amount` back, to be called once.

        Raises `too_much` (of the owner's amount under way, and of the new one) when that would exceed the limit.
        """
        with self._lock:
            if self._amounts[owner] + amount > limit:
                raise too_much(self._amounts[owner], amount)
            self._amounts[owner] += amount
        return partial(self._end, owner, amount)

    def _end(self, owner: str, amount: int) -> None:
        with self._lock:
            self._amounts[owner] -= amount
            if not self._amounts[owner]:
                del self._amounts[owner]


class Uploads:
    """The adapters under way through one front. Any thread may begin or end one."""

    def __init__(self) -> None:
        self._of_known = InFlight()
        self._bytes_of_unknown = InFlight()

    def begin(self, sender: Sender, num_bytes: int, info: EngineInfo) -> Callable[[], None]:
        """Count an upload of `num_bytes`. The answer ends it, and is to be called once.

        Raises TooManyUploads, TooManyUploadBytes.
        """
        most = info.limits.max_uploads_per_client
        if sender.is_known:
            client = sender.name or sender.key_id
            return self._of_known.begin(client, 1, most, lambda num_uploads, _: TooManyUploads(num_uploads))
        max_bytes = most * info.max_adapter_bytes
        too_many = partial(TooManyUploadBytes, max_bytes=max_bytes)
        return self._bytes_of_unknown.begin("", num_bytes, max_bytes, too_many)
