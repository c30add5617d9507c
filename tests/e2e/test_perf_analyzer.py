"""NVIDIA's load generator, which knows the models only by their configuration."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from multilora_client import Adapter, Client
from multilora_engine.tritonserver import ServerProcess

PERF_ANALYZER = Path(__file__).parents[2] / "scripts" / "perf_analyzer"
NUM_REQUESTS = 6


@pytest.fixture
def input_data(tmp_path: Path, client: Client, pirate: Adapter) -> Path:
    client.upload(pirate)
    return write_input_data(tmp_path, pirate.lora_task_id)


def write_input_data(folder: Path, lora_task_id: int) -> Path:
    path = folder / "input.json"
    request = {"text_input": ["Who are you?"], "max_tokens": [4], "lora_task_id": [lora_task_id]}
    path.write_text(json.dumps({"data": [request]}))
    return path


def run_perf_analyzer(model: str, url: str, input_data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    load = ["--concurrency-range=2", f"--request-count={NUM_REQUESTS}", f"--input-data={input_data}"]
    command = [PERF_ANALYZER, "-m", model, "-u", url, *load, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)


def check_all_answered(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stdout
    count = re.search(r"Request count: (\d+)", result.stdout)
    assert count is not None, result.stdout
    assert int(count[1]) >= NUM_REQUESTS


def test_it_loads_the_streaming_ensemble_over_grpc(server: ServerProcess, input_data: Path) -> None:
    check_all_answered(
        run_perf_analyzer("ensemble", server.grpc_url, input_data, "-i", "grpc", "--streaming", "--async")
    )


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_it_loads_the_unary_ensemble(server: ServerProcess, input_data: Path, protocol: str) -> None:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    check_all_answered(run_perf_analyzer("ensemble_unary", url, input_data, "-i", protocol))


def test_it_reports_an_adapter_that_the_server_does_not_have(server: ServerProcess, tmp_path: Path) -> None:
    result = run_perf_analyzer("ensemble_unary", server.http_url, write_input_data(tmp_path, 987654321), "-i", "http")
    assert result.returncode != 0
    assert "LoRA task 987654321 not found in cache" in result.stdout
