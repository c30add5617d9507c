"""Starts a server for a script; the server ends with the script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from multilora_engine.tritonserver import ServerOptions, ServerProcess
from multilora_engine.tritonserver.launch import sigterm_as_ctrl_c
from multilora_engine.tritonserver.upstream_models import UpstreamModels
from repository import REPOSITORY


@contextmanager
def started_server(
    model: Path,
    console: Console | None = None,
    upstream_models: UpstreamModels = UpstreamModels.NONE,
    overrides: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[ServerProcess]:
    """A server that is ready, on free ports; console: shows that it starts. overrides: of the engine's parameters.

    SIGTERM interrupts the script as Ctrl-C does: it would leave the server behind otherwise.
    """
    options = ServerOptions(
        model=model,
        model_repository=REPOSITORY / "model_repository",
        upstream_models=upstream_models,
        overrides=overrides,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    with sigterm_as_ctrl_c(), ServerProcess(options) as server:
        with (console or Console(quiet=True)).status("starting the server"):
            server.wait_ready()
        yield server
