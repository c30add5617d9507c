"""`multilora bench` on the real server: through every door, each answer is whole, and the same each time."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multilora_client.cli import app
from multilora_engine.tritonserver import ServerProcess

ADAPTERS = Path(__file__).parents[2] / "adapters"
NUM_REQUESTS = 16


@pytest.mark.parametrize(
    ("protocol", "door", "load"),
    [("grpc", "ensemble", "--concurrency=8"), ("grpc", "direct", "--rate=20"), ("http", "direct", "--concurrency=4")],
)
def test_clones_of_adapters_answer_alike_under_load(
    server: ServerProcess, tmp_path: Path, protocol: str, door: str, load: str
) -> None:
    url = f"{protocol}://{server.grpc_url if protocol == 'grpc' else server.http_url}"
    adapters = [f"--adapter={ADAPTERS / name}" for name in ("pirate", "json")]
    lengths = ["--prompt-tokens=16", "--output-tokens=6", f"--num-requests={NUM_REQUESTS}", "--num-prompts=2"]
    output = ["--check", f"--csv={tmp_path / 'requests.csv'}"]
    result = CliRunner().invoke(
        app, ["bench", "--url", url, "--door", door, load, *adapters, "--num-adapters=4", *lengths, *output]
    )
    assert result.exit_code == 0, result.output
    assert f"0 of {NUM_REQUESTS} answers differ" in result.stdout
    requests, adapters = map(float, re.findall(r"of a step\W+([\d.]+) / ([\d.]+)", result.stdout)[0])
    assert 1 <= adapters <= min(4, requests)
    with (tmp_path / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["input_tokens"], row["output_tokens"], row["error"]) for row in rows} == {("16", "6", "")}
