"""`FrontSettings`: what the front takes and shows. The command line knows it without the extra."""

from __future__ import annotations

from dataclasses import dataclass

from multilora_client.openai.tools.formats import ParserName

MAX_BODY_BYTES = 4 << 20
MAX_CONNECTIONS = 1000
MAX_CONNECTIONS_PER_ADDRESS = 128
REQUEST_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class FrontSettings:
    """max_body_bytes: of a request. has_docs: whether it describes itself at /docs and /openapi.json to every client.

    tool_call_parser: how the model writes calls of functions. cors_origins: web pages of these may ask, `*` for all.
    server_metrics_url: where the server's metrics are, which then are in the front's own.
    """

    max_body_bytes: int = MAX_BODY_BYTES
    has_docs: bool = False
    tool_call_parser: ParserName = "auto"
    cors_origins: tuple[str, ...] = ()
    server_metrics_url: str = ""
