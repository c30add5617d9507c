"""The server's command line: addresses, models, threads. Limits on clients are in hardening.py."""

from __future__ import annotations

from multilora_engine.tritonserver.addresses import Addresses
from multilora_engine.tritonserver.options import ServerOptions
from multilora_engine.tritonserver.shared_memory import RegionClaim

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
