"""The server's command line: addresses, models, threads, traces, limits on clients."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from multilora_engine.client_header import PASSED_ON
from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.addresses import Addresses
from multilora_engine.tritonserver.installation import has_flag
from multilora_engine.tritonserver.options import ServerOptions
from multilora_engine.tritonserver.shared_memory import RegionClaim

_CLOSED_APIS = ("model-repository", "logging", "trace")
_MAX_INPUT_FLAG = "--http-max-input-size"


def hardening_arguments(options: ServerOptions, executable: Path) -> list[str]:
    """Arguments of the server. Raises ConfigError for options that contradict each other, or that this server lacks."""
    headers = f"(?i)^({'|'.join(PASSED_ON)})$"
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
