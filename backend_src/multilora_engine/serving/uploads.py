"""How many adapters one client may be sending at once. A front holds the weights of each until the engine has them.

Triton tells a model nothing of who asks. An authenticating proxy can, by `CLIENT_HEADER`. Without one, all clients
count as one.
"""

from __future__ import annotations

from collections.abc import Callable

from multilora_engine.client_header import CLIENT_HEADER
from multilora_engine.engine_info import CallLimits
from multilora_engine.errors import TooManyUploads
from multilora_engine.serving.in_flight import InFlight
from multilora_engine.serving.triton_api import TritonRequest, parameters_of


def client_of(request: TritonRequest, limits: CallLimits) -> str:
    """Who sent a request, as its proxy says; empty where no one does. Raises InvalidRequest."""
    parameters = parameters_of(request, limits.max_metadata_bytes)
    return next((str(value) for name, value in parameters.items() if name.lower() == CLIENT_HEADER), "")


class Uploads:
    """The adapters under way through one front. Any thread may begin or end one."""

    def __init__(self) -> None:
        self._under_way = InFlight()

    def begin(self, client: str, limit: int) -> Callable[[], None]:
        """What ends the upload, to be called once. Raises TooManyUploads."""
        return self._under_way.begin(client, 1, limit, lambda num_uploads, _: TooManyUploads(num_uploads))
