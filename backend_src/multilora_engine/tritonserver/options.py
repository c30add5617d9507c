"""`ServerOptions`: the options of a server's start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multilora_engine.tritonserver.upstream_models import UpstreamModels


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
