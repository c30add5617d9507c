"""Host and ports of a server, checked before it starts: it notices a taken port only after loading all models."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from multilora_engine.errors import ConfigError


class PortTaken(ConfigError):
    """taken: the port, and why nobody can listen there."""

    def __init__(self, taken: str, option: str) -> None:
        super().__init__(f"{taken}; give {option} another port, or 0 for any free one")
        self.taken = taken


class HostUnusable(ConfigError):
    """The host is no address of this machine, whatever the port."""

    def __init__(self, host: str, reason: str | None) -> None:
        super().__init__(
            f"nobody can listen at the host {host}: {reason}; give --host an IPv4 address of this machine, or 0.0.0.0 "
            "for all of them"
        )


@dataclass(frozen=True)
class Addresses:
    """The addresses at which a server listens."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    http_host: str

    @property
    def http_url(self) -> str:
        """`host:port` of HTTP, as tritonclient wants it."""
        return f"{_reachable(self.http_host)}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """`host:port` of gRPC, as tritonclient wants it."""
        return f"{_reachable(self.host)}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus metrics."""
        return f"http://{_reachable(self.host)}:{self.metrics_port}/metrics"


def resolve_addresses(
    host: str, http_port: int, grpc_port: int, metrics_port: int, http_host: str | None = None
) -> Addresses:
    """Replace each port 0 by a free one. Raises PortTaken or HostUnusable. http_host: else `host`."""
    http_host = host if http_host is None else http_host
    with (
        _bind(http_host, http_port, "HTTP") as http,
        _bind(host, grpc_port, "gRPC") as grpc,
        _bind(host, metrics_port, "metrics") as metrics,
    ):
        http_port, grpc_port, metrics_port = (bound.getsockname()[1] for bound in (http, grpc, metrics))
        return Addresses(host, http_port, grpc_port, metrics_port, http_host)


def _reachable(host: str) -> str:
    """The host at which clients on this machine find a server that listens at `host`."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def _bind(host: str, port: int, purpose: str) -> socket.socket:
    bound = socket.socket()
    # Without it a port that a server has just left counts as taken for a minute; tritonserver sets it too.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen()
    except OSError as error:
        bound.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise HostUnusable(host, error.strerror) from None
        raise PortTaken(f"{purpose} port {port} on {host}: {error.strerror}", f"--{purpose.lower()}-port") from None
    return bound
