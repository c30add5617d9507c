"""The parts that `multilora openai` and `multilora console` share: options, listening, and the checks at the start."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any

import typer

from multilora_client.client import AsyncClient, parse_url
from multilora_client.errors import InvalidRequest, MultiloraClientError, Unavailable, Unsupported
from multilora_client.tls import Tls

_PATIENCE_S = 3.0
"""The seconds to wait at the start for a server that says nothing."""

_EXTRA = ("fastapi", "prometheus_client", "uvicorn")

Certificate = Annotated[Path | None, typer.Option(help="PEM file: HTTP takes TLS only, with this.", show_default=False)]
Key = Annotated[Path | None, typer.Option(help="PEM file: the certificate's key.", show_default=False)]
AllowHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="A name that people reach the console by, besides localhost and addresses; may be repeated.",
    ),
]


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, taken before anything says that the front has started. Raises OSError with the address."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error


def listening_url(listener: socket.socket, certificate: Path | None) -> str:
    """The address that clients use, without a path."""
    host, port, *_ = listener.getsockname()
    return f"http{'s' if certificate else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def tell_unreachable(server: str, tls: Tls | None) -> None:
    """Say when no server answers at the address; the program starts all the same, since a server may come later.

    Raises InvalidRequest for an address that no server can have.
    """
    parse_url(server, tls)
    try:
        asyncio.run(asyncio.wait_for(_describe(server, tls), _PATIENCE_S))
    except (TimeoutError, Unavailable):
        typer.echo(f"warning: no server answers at {server}; until one does, requests get status 503", err=True)
    except MultiloraClientError as error:
        typer.echo(f"warning: the server at {server} answers with [{error.code}] {error}", err=True)


async def _describe(server: str, tls: Tls | None) -> None:
    async with AsyncClient(server, tls=tls) as client:
        await client.describe_model()


def forwarding_options(trusted_proxies: Sequence[str]) -> dict[str, Any]:
    """The options of uvicorn by which it takes the client's address from `X-Forwarded-For` of these proxies alone.

    trusted_proxies: addresses and networks. Raises InvalidRequest for a text that is neither.
    """
    for text in trusted_proxies:
        try:
            ip_network(text)
        except ValueError as error:
            raise InvalidRequest(
                f"--trusted-proxy is {text!r}; write an address as 10.0.0.7 or a network as 10.0.0.0/24 ({error})"
            ) from None
    return {"proxy_headers": bool(trusted_proxies), "forwarded_allow_ips": list(trusted_proxies)}


def check_extra() -> None:
    """Raises Unsupported where the extra `openai` is not installed."""
    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        raise Unsupported(
            f"{' and '.join(missing)} missing; install the extra: pip install './client[openai]' in a clone"
        )


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raises InvalidRequest for files that are no certificate with its key."""
    if (certificate is None) != (key is None):
        raise InvalidRequest("TLS takes two files: give both --certificate and --key")
    if certificate is not None and key is not None:
        Tls(certificate=certificate, key=key)
