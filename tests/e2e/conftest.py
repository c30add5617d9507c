"""One real server with the real default model for all end-to-end tests. Its log is in the report of a failing test."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import tritonclient.grpc
import tritonclient.http
from support.conformance import IDS, NUM_TOKENS
from support.stock_clients import token_request, unary, whole_tokens

from multilora_client import Adapter, Client, convert_peft, load_adapter
from multilora_engine.tritonserver import ServerOptions, ServerProcess
from multilora_engine.tritonserver.upstream_models import UpstreamModels
from training.sample_adapters import STYLE_ADAPTERS

REPOSITORY = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def server(default_model_dir: Path) -> Iterator[ServerProcess]:
    # Lets pytest capture the server's log, which ServerProcess hands to logging.
    logging.getLogger("multilora_engine.tritonserver").setLevel(logging.INFO)
    options = ServerOptions(
        model=default_model_dir,
        model_repository=REPOSITORY / "model_repository",
        upstream_models=UpstreamModels.DECOUPLED,
        overrides={
            "kv_cache_memory_bytes": "384MiB",
            "max_num_seqs": "8",
            "lora_cache_host_memory_bytes": "256MiB",
            "lora_sources": json.dumps([{"source": "directory", "root": str(REPOSITORY / "adapters")}]),
        },
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    with ServerProcess(options) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def url(server: ServerProcess) -> str:
    """Where gRPC is."""
    return server.grpc_url


@pytest.fixture(scope="session")
def greedy(url: str) -> list[int]:
    """The base model's answer to the conformance tests' prompt, in tokens."""
    return whole_tokens(unary(url, "generation_unary", token_request(IDS, NUM_TOKENS, False)), len(IDS))


@pytest.fixture(scope="session")
def vocabulary(default_model_dir: Path) -> tokenizers.Tokenizer:
    """The default model's tokenizer, as its own library has it."""
    return tokenizers.Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """Our client over gRPC, at the direct door."""
    with Client(f"grpc://{server.grpc_url}") as client:
        yield client


@pytest.fixture
def http_client(server: ServerProcess) -> Iterator[Client]:
    """Our client over HTTP, at the direct door."""
    with Client(f"http://{server.http_url}") as client:
        yield client


@pytest.fixture
def triton_grpc(server: ServerProcess) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    """What a client without our package uses."""
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        yield client


@pytest.fixture
def triton_http(server: ServerProcess) -> Iterator[tritonclient.http.InferenceServerClient]:
    """What a client without our package uses."""
    with tritonclient.http.InferenceServerClient(server.http_url) as client:
        yield client


@pytest.fixture(scope="session")
def pirate() -> Adapter:
    """A sample adapter on all linear layers, as tensors."""
    return Adapter(1, convert_peft(REPOSITORY / "adapters" / "pirate"))


@pytest.fixture
def samples(client: Client) -> dict[str, Adapter]:
    """The sample adapters of styles, with the task ids 11, 12, 13; the server has them, whatever was evicted before."""
    names = sorted(STYLE_ADAPTERS)
    adapters = {name: load_adapter(STYLE_ADAPTERS[name].directory, 11 + i) for i, name in enumerate(names)}
    for adapter in adapters.values():
        client.upload(adapter)
    return adapters
