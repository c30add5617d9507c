"""`FrontSettings`: the settings of the front. The command line knows them without the extra."""

from __future__ import annotations

from dataclasses import dataclass, field

from multilora_client.console.settings import ConsoleSettings
from multilora_client.openai.tools.formats import ParserName
from multilora_client.openai.tools.reasoning import ReasoningName

MAX_BODY_BYTES = 4 << 20
MAX_CONNECTIONS = 1000
MAX_CONNECTIONS_PER_ADDRESS = 128
REQUEST_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class FrontSettings:
    """max_body_bytes: the limit of a request. has_docs: whether every client may read /docs and /openapi.json.

    tool_call_parser: how the model writes calls of functions. reasoning_parser: where its thinking begins.
    cors_origins: their web pages may ask, `*` for all.
    server_metrics_url: the address of the server's metrics, which then are in the front's own.
    console: the settings of the console that is served at `/`; None for no console.
    client_header_secret: shared with the server, so that the server learns the caller of each request.
    """

    max_body_bytes: int = MAX_BODY_BYTES
    has_docs: bool = False
    tool_call_parser: ParserName = "auto"
    reasoning_parser: ReasoningName = "auto"
    cors_origins: tuple[str, ...] = ()
    server_metrics_url: str = ""
    console: ConsoleSettings | None = None
    client_header_secret: str = field(default="", repr=False)
