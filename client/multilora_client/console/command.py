"""`multilora console`: serve the page. Imports the extra only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from multilora_client.client import DEFAULT_URL, AsyncClient
from multilora_client.console.settings import MAX_UPLOAD_BYTES, ConsoleSettings
from multilora_client.openai.serving import (
    AllowHosts,
    Certificate,
    Key,
    check_certificate,
    check_extra,
    forwarding_options,
    listen,
    listening_url,
    tell_unreachable,
)
from multilora_client.openai.settings import MAX_CONNECTIONS_PER_ADDRESS
from multilora_client.terminal import Url, one_line_errors

_REQUEST_TIMEOUT_S = 600.0
"""The seconds that a request may take to arrive, a large adapter over a slow line among them."""

Host = Annotated[str, typer.Option(help="Address to listen at; beyond loopback, use API keys and TLS.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.")]
ReadOnly = Annotated[
    bool, typer.Option("--read-only", help="Look and ask only: nothing is uploaded, loaded, pinned or unloaded.")
]
MaxUploadBytes = Annotated[int, typer.Option(min=1, help="Most bytes of one adapter's files.")]
HttpUrl = Annotated[
    str, typer.Option(help="Where clients reach the server's HTTP, for the curl commands that the page shows.")
]
OpenaiUrl = Annotated[
    str, typer.Option(help="Where clients reach `multilora openai`, for the code that the page shows.")
]


def console(
    ctx: typer.Context,
    url: Url = DEFAULT_URL,
    host: Host = "127.0.0.1",
    port: Port = 9100,
    allow_host: AllowHosts = None,
    read_only: ReadOnly = False,
    max_upload_bytes: MaxUploadBytes = MAX_UPLOAD_BYTES,
    http_url: HttpUrl = "http://localhost:8000",
    openai_url: OpenaiUrl = "http://localhost:9000/v1",
    certificate: Certificate = None,
    key: Key = None,
) -> None:
    """Serve a page to look at a running server: its adapters by tier, its load, and a playground.

    With API keys at the server, the page asks for one and sends it along; the console keeps none.

    \b
    Examples:
      multilora console
      multilora console --url grpc://host:8001 --read-only --port 9100
    """
    with one_line_errors():
        check_extra()
        import uvicorn

        from multilora_client.console.app import make_app
        from multilora_client.openai.connections import guarded_protocol

        check_certificate(certificate, key)
        settings = ConsoleSettings(
            is_read_only=read_only,
            hosts=(host, *(allow_host or ())),
            max_upload_bytes=max_upload_bytes,
            server_url=url,
            http_url=http_url,
            openai_url=openai_url,
        )
        with listen(host, port) as listener:
            tell_unreachable(url, ctx.obj)
            config = uvicorn.Config(
                make_app(lambda: AsyncClient(url, tls=ctx.obj, api_key=""), settings),
                server_header=False,
                http=guarded_protocol(MAX_CONNECTIONS_PER_ADDRESS, _REQUEST_TIMEOUT_S),
                log_level="warning",
                ssl_certfile=certificate,
                ssl_keyfile=key,
                **forwarding_options([]),
            )
            typer.echo(f"console: {listening_url(listener, certificate)}/", err=True)
            uvicorn.Server(config).run(sockets=[listener])
