"""The options of a server, its host and ports, and its command line: models, threads, traces, limits on clients.

Ports are checked before the start: the server notices a taken port only after it has loaded all models.
"""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.installation import has_flag
from multilora_engine.tritonserver.shared_memory import RegionClaim
from multilora_engine.tritonserver.upstream_models import UpstreamModels
from multilora_wire.headers import CLIENT_HEADER, KEY_HEADER


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of `multilora-serve`. A port of 0 means any free one, `http_host` None is `host`.

    has_http: False closes HTTP altogether, except for the metrics; the canary asks over gRPC then, without TLS.
    """

    model: Path | None = None
    model_repository: Path | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    upstream_models: UpstreamModels = UpstreamModels.NONE
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    http_host: str | None = None
    has_http: bool = True
    grpc_certificate: Path | None = None
    grpc_key: Path | None = None
    grpc_client_ca: Path | None = None
    max_http_bytes: int | None = None
    shared_memory_api: bool = False
    trace_config: Sequence[str] = ()
    log_verbose: bool = False
    exit_timeout_s: int = 30
    startup_timeout_s: float = 600.0
    tritonserver: Path | None = None


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


_CLOSED_APIS = ("model-repository", "logging", "trace")
_MAX_INPUT_FLAG = "--http-max-input-size"


def hardening_arguments(options: ServerOptions, executable: Path) -> list[str]:
    """Arguments of the server. Raises ConfigError for options that contradict each other, or that this server lacks."""
    headers = f"(?i)^({CLIENT_HEADER}|{KEY_HEADER})$"
    return [
        *_restrictions(options),
        *_tls(options),
        *_size_limit(options, executable),
        f"--http-header-forward-pattern={headers}",
        f"--grpc-header-forward-pattern={headers}",
    ]


def _restrictions(options: ServerOptions) -> list[str]:
    # Closed by a secret that nobody is told: the server has no flag that turns these off. A client that may register
    # shared memory can reach the Python backend's own regions in servers before 25.07.
    closed = _CLOSED_APIS if options.shared_memory_api else ("shared-memory", *_CLOSED_APIS)
    rule = f"{','.join(closed)}:multilora-closed={secrets.token_hex(16)}"
    return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]


def _tls(options: ServerOptions) -> list[str]:
    certificate, key, client_ca = options.grpc_certificate, options.grpc_key, options.grpc_client_ca
    if certificate is None and key is None and client_ca is None:
        return []
    if not options.has_http:
        raise ConfigError(
            "--no-http leaves gRPC to the canary, which has no certificate: let a proxy end TLS, or keep HTTP to this "
            "machine by --http-host 127.0.0.1"
        )
    if certificate is None or key is None:
        raise ConfigError("TLS for gRPC takes two files: give both --grpc-certificate and --grpc-key")
    for file in filter(None, (certificate, key, client_ca)):
        if not file.is_file():
            raise ConfigError(f"{file} is not a file; give a PEM file")
    arguments = [f"--grpc-server-cert={certificate.absolute()}", f"--grpc-server-key={key.absolute()}"]
    if client_ca is None:
        return ["--grpc-use-ssl=1", *arguments]
    return ["--grpc-use-ssl-mutual=1", *arguments, f"--grpc-root-cert={client_ca.absolute()}"]


def _size_limit(options: ServerOptions, executable: Path) -> list[str]:
    if options.max_http_bytes is None:
        return []
    if not has_flag(executable, _MAX_INPUT_FLAG):
        raise ConfigError(
            f"--max-http-bytes: this tritonserver has no {_MAX_INPUT_FLAG}; take a newer one, or limit the size of "
            "requests in the proxy before it"
        )
    return [f"{_MAX_INPUT_FLAG}={options.max_http_bytes}"]


_FLAG = "--trace-config"


def tracing_arguments(settings: Sequence[str], executable: Path) -> list[str]:
    """Arguments of the server. Raises ConfigError when it was built without tracing."""
    if settings and not has_flag(executable, _FLAG):
        raise ConfigError(f"{_FLAG}: this tritonserver was built without tracing; take another one, or leave it out")
    return [f"{_FLAG}={setting}" for setting in settings]


_ANSWER_THREADS = 2
"""Threads of each model instance in the server that pass its answers on. A model of ours sends one after the other.

Of the backend's own 32, five models made 200 threads, and malloc keeps up to seven freed blocks of each size for every
thread: memory that grows for hours. After 5,000 mixed requests to models of ten lines the server had 10.9 MiB, of it
0.9 since the first 1,000; with two threads 7.2 and 0.2, at the same rate within its scatter.
"""


def server_arguments(options: ServerOptions, addresses: Addresses, regions: RegionClaim) -> list[str]:
    """The command line after the executable, without the folders."""
    return [
        *(() if options.has_http else ("--allow-http=false",)),
        f"--http-address={addresses.http_host}",
        f"--grpc-address={addresses.host}",
        f"--metrics-address={addresses.host}",
        f"--http-port={addresses.http_port}",
        f"--grpc-port={addresses.grpc_port}",
        f"--metrics-port={addresses.metrics_port}",
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        f"--log-verbose={int(options.log_verbose)}",
        f"--backend-config=python,shm-region-prefix-name={regions.region_prefix}",
        f"--backend-config=python,thread-pool-size={_ANSWER_THREADS}",
    ]
