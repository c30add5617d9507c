"""How many adapters one client may be sending at once. A front holds the weights of each until the engine has them.

A client is the tenant of an API key, or who a proxy says. Without both, all clients count as one: Triton tells a model
nothing of who asks.
"""

from __future__ import annotations

from collections.abc import Callable

from multilora_engine.errors import TooManyUploads
from multilora_engine.serving.in_flight import InFlight


class Uploads:
    """The adapters under way through one front. Any thread may begin or end one."""

    def __init__(self) -> None:
        self._under_way = InFlight()

    def begin(self, client: str, limit: int) -> Callable[[], None]:
        """What ends the upload, to be called once. Raises TooManyUploads."""
        return self._under_way.begin(client, 1, limit, lambda num_uploads, _: TooManyUploads(num_uploads))
