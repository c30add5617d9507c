"""Weights packed, unpacked and listed on a real server while it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multilora_client import Client, InvalidRequest, load_adapter
from multilora_client.cli import app
from multilora_engine.quickstart.quantized_default_model import ensure_quantized_checkpoint
from multilora_engine.tritonserver import ServerOptions, ServerProcess

REPOSITORY = Path(__file__).parents[2]
PIRATE = 1
CHAT = [{"role": "user", "content": "What do bees make?"}]


def test_a_model_of_floats_has_no_weights_to_switch(client: Client) -> None:
    for action in ("list", "unpack", "pack"):
        with pytest.raises(InvalidRequest, match="the model has no quantised weights"):
            client.switch_weights(action)


@pytest.fixture(scope="module")
def quantized_server() -> Iterator[ServerProcess]:
    """The default model in w8a16."""
    options = ServerOptions(
        model=ensure_quantized_checkpoint("w8a16"),
        model_repository=REPOSITORY / "model_repository",
        overrides={
            "kv_cache_memory_bytes": "64MiB",
            "lora_cache_host_memory_bytes": "64MiB",
            "max_lora_rank": "16",
        },
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    with ServerProcess(options) as server:
        server.wait_ready()
        yield server


@pytest.mark.long(reason="quantises the default model, and starts a server of its own")
def test_a_server_answers_while_weights_are_switched(quantized_server: ServerProcess) -> None:
    with Client(f"grpc://{quantized_server.grpc_url}") as client:
        client.upload(load_adapter(REPOSITORY / "adapters" / "pirate", PIRATE))
        assert not any(weight["unpacked_bytes"] for weight in client.switch_weights("list")["weights"])
        before = {task_id: text(client, task_id) for task_id in (None, PIRATE)}
        assert all(before.values())
        assert before[None] != before[PIRATE]

        stream = client.stream(messages=CHAT, adapter=PIRATE, max_tokens=32)
        pieces = [next(stream).text]
        report = client.switch_weights("unpack", ["model.layers.*"])
        assert all(weight["unpacked_bytes"] == weight["needed_bytes"] for weight in report["weights"])
        assert report["stats"]["unpacked_bytes"] > 400 << 20
        floats = {task_id: text(client, task_id) for task_id in before}
        assert all(floats.values())
        assert floats[None] != floats[PIRATE]

        assert client.switch_weights("pack", ["*"])["stats"]["unpacked_bytes"] == 0
        pieces += [chunk.text for chunk in stream]
        assert "".join(pieces)
        assert {task_id: text(client, task_id) for task_id in before} == before


@pytest.mark.long(reason="quantises the default model, and starts a server of its own")
def test_the_command_switches_weights_of_a_server(quantized_server: ServerProcess) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["weights", *arguments, "--url", f"grpc://{quantized_server.grpc_url}"])
        assert result.exit_code == 0, result.output
        return result.output

    name = "model.layers.5.mlp.down_proj"
    assert f"{name}: int8 in groups of " in run("unpack", name)
    assert "floats in all: 0 of " not in run("list", name)
    assert "floats in all: 0 of " in run("pack", "*")


def text(client: Client, task_id: int | None) -> str:
    return client.generate(messages=CHAT, adapter=task_id, max_tokens=32).text
