"""The proxy of docker/proxy, Debian's nginx, before the real tritonserver with models of a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.small_models import write_small_models

from multilora_engine.tritonserver import ServerOptions, ServerProcess
from servers.local_proxy import LocalProxy


@pytest.fixture(scope="session")
def proxied_server(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Iterator[ServerProcess]:
    repository = write_small_models(tmp_path_factory.mktemp("proxied"))
    options = ServerOptions(
        model=default_model_dir, model_repository=repository, http_port=0, grpc_port=0, metrics_port=0
    )
    with ServerProcess(options, probe=lambda url: None) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def open_proxy(proxied_server: ServerProcess) -> Iterator[Callable[..., LocalProxy]]:
    """Opens a proxy before the server; with other settings, where a test wants them."""
    ports = proxied_server.addresses
    with ExitStack() as stack:

        def open_proxy(**options: Any) -> LocalProxy:
            proxy = LocalProxy(ports.http_port, ports.grpc_port, ports.metrics_port, **options)
            return stack.enter_context(proxy)

        yield open_proxy


@pytest.fixture(scope="session")
def proxy(open_proxy: Callable[..., LocalProxy]) -> LocalProxy:
    return open_proxy()
