"""What `multilora openai` serves, and what it refuses to start with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

from multilora_client import AdapterTensors
from multilora_client.cli import app
from multilora_client.openai import command


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["openai", *map(str, arguments)])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Applications that uvicorn was to run, with its options."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(uvicorn, "run", lambda application, **options: calls.append((application, options)))
    return calls


@pytest.fixture
def adapters(tmp_path: Path, small_tensors: AdapterTensors) -> Path:
    """A file of one adapter, `poet`, whose directory is beside it; `other` is a second directory."""
    small_tensors.save(tmp_path / "poet files")
    small_tensors.save(tmp_path / "other")
    path = tmp_path / "adapters.json"
    path.write_text(json.dumps({"poet": "poet files"}))
    return path


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_it_listens_on_loopback_and_serves_what_files_and_options_name(
    served: list[Any], adapters: Path, fake_triton: Any
) -> None:
    keys = write(adapters.with_name("keys.json"), {"k": ["*"], "p": ["pirate"]})
    pirate = f"pirate={adapters.with_name('other')}"

    result = run("--server", fake_triton.url, "--adapters", adapters, "--adapter", pirate, "--api-keys", keys)

    assert result.exit_code == 0, result.output
    ((application, options),) = served
    assert (options["host"], options["port"], options["limit_concurrency"]) == ("127.0.0.1", 9000, 1000)
    with TestClient(application, headers={"Authorization": "Bearer k"}) as front:
        assert [model["id"] for model in front.get("/v1/models").json()["data"]] == ["base", "poet", "pirate"]
        answer = front.post("/v1/completions", json={"model": "poet", "prompt": "hi"})
        assert answer.json()["choices"][0]["text"] == "Ahoy, café"
    assert fake_triton.received[0][1]["lora_weights"].shape == (1, 2, 7)


@pytest.mark.parametrize(
    ("adapters_file", "keys_file", "options", "message"),
    [
        ({"a": "nowhere"}, None, [], "[INVALID_ADAPTER]"),
        ({"a": 3}, None, [], "must map each adapter's name to its directory"),
        ([], None, [], "is not a JSON object"),
        ("{", None, [], "is not JSON"),
        ({"": "other"}, None, [], "empty name"),
        ({"base": "other"}, None, [], "called 'base', like the base model"),
        ({"a": "other"}, None, ["--adapter", "a=other"], "adapter 'a' is given twice"),
        ({}, None, ["--adapter", "other"], "write NAME=DIR"),
        ({}, {"secret": "base"}, [], "to a list of model names"),
        ({}, {"": ["base"]}, [], "may not be empty"),
        ({}, {"secret": ["pirate"]}, [], "may use ['pirate'], and there are no such models"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(
    served: list[Any], adapters: Path, adapters_file: Any, keys_file: Any, options: list[str], message: str
) -> None:
    if keys_file is not None:
        options = [*options, "--api-keys", str(write(adapters.with_name("keys.json"), keys_file))]
    result = run("--adapters", write(adapters, adapters_file), *options)

    assert (result.exit_code, served) == (1, [])
    assert message in result.stderr
    assert "secret" not in result.stderr


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = run()

    assert (result.exit_code, served) == (1, [])
    assert "fastapi and uvicorn missing" in result.stderr
    assert "multilora-client[openai]" in result.stderr
