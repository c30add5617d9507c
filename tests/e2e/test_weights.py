"""Weights packed, unpacked and listed on a real server while it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints.quantized_default_model import ensure_quantized_checkpoint
from multilora_client import Client, InvalidRequest, Unavailable, load_adapter
from multilora_client.cli import app
from multilora_engine.models.weights import MEASURED_ROWS
from multilora_engine.tritonserver import ServerOptions, ServerProcess

REPOSITORY = Path(__file__).parents[2]
PIRATE = 1
PROMPT = "What do bees make?"
BUDGET = 480 << 20
"""Enough for the floats of all layers of the default model, and not for those of its head, too."""


def test_a_model_of_floats_has_no_weights_to_switch(client: Client) -> None:
    for action in ("list", "unpack", "pack"):
        with pytest.raises(InvalidRequest, match="the model has no quantised weights"):
            client.switch_weights(action)


@pytest.fixture(scope="module")
def quantized_server() -> Iterator[ServerProcess]:
    """The default model in w8a16; its first layer is unpacked from the start."""
    options = ServerOptions(
        model=ensure_quantized_checkpoint("w8a16"),
        model_repository=REPOSITORY / "model_repository",
        overrides={
            "kv_cache_memory_bytes": "64MiB",
            "lora_cache_host_memory_bytes": "64MiB",
            "max_lora_rank": "16",
            "unpacked_weights_memory_bytes": str(BUDGET),
            "unpacked_weights": "model.layers.0.*",
        },
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    with ServerProcess(options) as server:
        server.wait_ready()
        yield server


@pytest.mark.long(reason="quantises the default model, and starts a server of its own")
def test_a_switch_on_a_server_that_answers_changes_no_token(quantized_server: ServerProcess) -> None:
    with Client(f"grpc://{quantized_server.grpc_url}") as client:
        client.upload(load_adapter(REPOSITORY / "adapters" / "pirate", PIRATE))
        listed = client.switch_weights("list")["weights"]
        unpacked = {name for weight in listed if weight["unpacked_bytes"] for name in weight["modules"]}
        assert unpacked == {name for weight in listed for name in weight["modules"] if ".layers.0." in name}
        assert len(unpacked) == 7
        before = {task_id: text(client, task_id) for task_id in (None, PIRATE)}
        assert before[None] != before[PIRATE]

        stream = client.stream(PROMPT, adapter=PIRATE, max_tokens=32)
        pieces = [next(stream).text]
        report = client.switch_weights("unpack", ["model.layers.*"], "unpacked")
        assert all(weight["unpacked_rows"] == list(MEASURED_ROWS) for weight in report["weights"])
        assert report["stats"]["unpacked_bytes"] > 400 << 20
        with pytest.raises(Unavailable, match=f"unpacked_weights_memory_bytes is {BUDGET}; pack others first"):
            client.switch_weights("unpack", ["*"])
        assert {task_id: text(client, task_id) for task_id in before} == before

        assert client.switch_weights("pack", ["*"])["stats"]["unpacked_bytes"] == 0
        pieces += [chunk.text for chunk in stream]
        assert "".join(pieces) == before[PIRATE]
        assert {task_id: text(client, task_id) for task_id in before} == before


@pytest.mark.long(reason="quantises the default model, and starts a server of its own")
def test_the_command_switches_weights_of_a_server(quantized_server: ServerProcess) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["weights", *arguments, "--url", f"grpc://{quantized_server.grpc_url}"])
        assert result.exit_code == 0, result.output
        return result.output

    name = "model.layers.5.mlp.down_proj"
    assert f"{name}: int8 in groups of " in run("unpack", name, "--path", "unpacked")
    rows = ",".join(map(str, MEASURED_ROWS))
    assert f"used from rows: {rows}" in run("list", name)
    assert f"floats in all: 0 of {BUDGET} bytes" in run("pack", "*")


def text(client: Client, task_id: int | None) -> str:
    return client.generate(PROMPT, adapter=task_id, max_tokens=32).text
