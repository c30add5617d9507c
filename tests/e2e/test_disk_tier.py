"""Adapters on a real server's disk: they outlive eviction and the server, and a damaged one hurts nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from multilora_client import Adapter, AdapterNotFound, Client, load_adapter
from multilora_engine.tritonserver import ServerOptions, ServerProcess

REPOSITORY = Path(__file__).parents[2]
PIRATE, JSON = 1, 2


@contextmanager
def serving(model: Path, directory: Path) -> Iterator[Client]:
    """A server whose host memory holds a handful of adapters, without the models that no adapter passes through."""
    models = directory / "models"
    models.mkdir(exist_ok=True)
    for name in ("generation", "generation_unary", "adapters"):
        if not (models / name).exists():
            (models / name).symlink_to(REPOSITORY / "model_repository" / name)
    options = ServerOptions(
        model=model,
        model_repository=models,
        overrides={
            "kv_cache_memory_bytes": "64MiB",
            "max_lora_rank": "16",
            "lora_cache_host_memory_bytes": "32MiB",
            "lora_cache_dir": str(directory / "cache"),
        },
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    # The usual probe asks an ensemble, too.
    with ServerProcess(options, probe=lambda http_url: None) as server, Client(f"grpc://{server.grpc_url}") as client:
        server.wait_ready()
        yield client


def ask(client: Client, task_id: int) -> str:
    return client.generate("What do bees make?", adapter=task_id, max_tokens=12).text


def evict(client: Client, task_id: int, adapter: Adapter) -> None:
    """Upload others until an adapter is only on disk."""
    for other in count(100):
        client.upload(Adapter(other, adapter.content))
        locations = {info.lora_task_id: info.location for info in client.list_adapters()}
        if locations[task_id] == "DISK":
            return
        assert other < 150, "it should have been evicted"


def test_an_evicted_adapter_answers_by_id_alone_and_after_a_restart_unless_its_file_is_damaged(
    default_model_dir: Path, tmp_path: Path
) -> None:
    adapters = {
        task_id: load_adapter(REPOSITORY / "adapters" / name, task_id)
        for task_id, name in ((PIRATE, "pirate"), (JSON, "json"))
    }
    with serving(default_model_dir, tmp_path) as client:
        for adapter in adapters.values():
            client.upload(adapter)
        before = {task_id: ask(client, task_id) for task_id in adapters}
        assert before[PIRATE] != before[JSON]
        evict(client, PIRATE, adapters[PIRATE])
        assert ask(client, PIRATE) == before[PIRATE]

    path = tmp_path / "cache" / f"{JSON}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with serving(default_model_dir, tmp_path) as client:
        with pytest.raises(AdapterNotFound, match="its file in lora_cache_dir could not be read"):
            ask(client, JSON)
        assert ask(client, PIRATE) == before[PIRATE]
        client.upload(adapters[JSON])
        assert ask(client, JSON) == before[JSON]
