"""The options of `multilora openai`: the ones that it serves, and the ones that it refuses to start with."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from support.api_keys import ENTRIES, OPERATORS_KEY, write_keys
from typer.testing import CliRunner, Result

from multilora_client import AdapterTensors
from multilora_client.cli import app
from multilora_client.openai import serving

MODEL = {"model": "tiny", "max_model_len": 4096, "vocab_size": 11, "version": "1", "adapters": []}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["openai", *map(str, arguments)])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What uvicorn was to run, and at which address."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    def run_server(front: uvicorn.Server, sockets: list[socket.socket]) -> None:
        calls.append((front.config, sockets[0].getsockname()))

    monkeypatch.setattr(uvicorn.Server, "run", run_server)
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


def test_a_file_without_a_secret_is_refused(tmp_path: Path) -> None:
    for content in ("", "two words", "na\u00efve"):
        result = run("--client-header-secret-file", write(tmp_path / "secret", content))
        assert result.exit_code == 1
        assert "holds no secret" in result.stderr
    assert "No such file" in run("--client-header-secret-file", tmp_path / "absent").stderr


def test_it_listens_on_loopback_and_serves_what_files_and_options_name(
    served: list[Any], adapters: Path, fake_triton: Any
) -> None:
    fake_triton.report = MODEL
    keys = write_keys(adapters.with_name("keys.json"), *ENTRIES)
    pirate = f"pirate={adapters.with_name('other')}"

    result = run(
        *("--url", fake_triton.url, "--adapters", adapters, "--adapter", pirate),
        *("--api-keys", keys, "--port", 0, "--cors-origin", "https://chat.example"),
    )

    assert result.exit_code == 0, result.output
    ((config, address),) = served
    assert (address[0], config.limit_concurrency) == ("127.0.0.1", 1000)
    assert f"serving http://127.0.0.1:{address[1]}/v1, from {fake_triton.url}" in result.stderr
    assert "warning" not in result.stderr
    with TestClient(
        config.app, headers={"Authorization": f"Bearer {OPERATORS_KEY}".encode(), "Origin": b"https://chat.example"}
    ) as front:
        listing = front.get("/v1/models")
        assert [model["id"] for model in listing.json()["data"]] == ["base", "poet", "pirate"]
        assert listing.headers["access-control-allow-origin"] == "https://chat.example"
        answer = front.post("/v1/completions", json={"model": "poet", "prompt": "hi"})
        assert answer.json()["choices"][0]["text"] == "Ahoy, café"
    models = [(model, inputs) for model, inputs in fake_triton.received if model != "adapters"]
    assert models[0][1]["lora_weights"].shape == (1, 2, 7)


@pytest.mark.parametrize(
    ("options", "sender", "forwarded", "named"),
    [
        ((), "127.0.0.1", "198.51.100.7", "127.0.0.1"),
        ((), "::1", "198.51.100.7", "::/64"),
        (("--trusted-proxy", "10.0.0.7"), "127.0.0.1", "198.51.100.7", "127.0.0.1"),
        (("--trusted-proxy", "10.0.0.7"), "10.0.0.7", "198.51.100.7", "198.51.100.7"),
        (("--trusted-proxy", "10.0.0.7"), "10.0.0.7", "203.0.113.9, 198.51.100.7", "198.51.100.7"),
        (("--trusted-proxy", "::1", "--trusted-proxy", "10.0.0.0/24"), "10.0.0.9", "2001:db8::5", "2001:db8::/64"),
    ],
)
def test_only_a_trusted_proxy_tells_the_address_of_a_client(
    served: list[Any],
    fake_triton: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    sender: str,
    forwarded: str,
    named: str,
) -> None:
    fake_triton.report = MODEL
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own; it opens no second way
    secret = write(tmp_path / "secret", "theSecretOfBoth16")
    result = run("--url", fake_triton.url, "--port", 0, "--client-header-secret-file", secret, *options)
    assert result.exit_code == 0, result.output
    ((config, _),) = served
    config.load()

    with TestClient(config.loaded_app, client=(sender, 50000)) as front:
        body = {"model": "base", "prompt": "hi"}
        assert front.post("/v1/completions", json=body, headers={"X-Forwarded-For": forwarded}).status_code == 200
    assert fake_triton.headers[-1]["x-multilora-client"] == f"theSecretOfBoth16 {named}"


def test_the_console_beside_it_is_reached_by_the_names_that_the_options_allow(
    served: list[Any], fake_triton: Any
) -> None:
    fake_triton.report = MODEL
    result = run("--url", fake_triton.url, "--port", 0, "--console", "--allow-host", "chat.example")

    assert result.exit_code == 0, result.output
    ((config, _),) = served
    with TestClient(config.app, base_url="http://chat.example") as front:
        assert front.get("/").url.path == "/console/"
        refused = front.get("/console/", headers={"Host": "evil.example"})
    assert refused.status_code == 421
    assert "--allow-host" in refused.json()["error"]["message"]


def test_a_taken_port_is_said_before_anything_has_started(served: list[Any], fake_triton: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--url", fake_triton.url, "--port", port)

    assert (result.exit_code, served) == (1, [])
    assert result.stderr.startswith(f"error: cannot listen at 127.0.0.1, port {port}: Address already in use")


def test_a_server_that_does_not_answer_is_said_and_waited_for(served: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"grpc://127.0.0.1:{unused.getsockname()[1]}"
    result = run("--url", url, "--port", 0)

    assert (result.exit_code, len(served)) == (0, 1)
    assert f"warning: no server answers at {url}; until one does, requests get status 503" in result.stderr


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
        ({}, {"secret": ["base"]}, [], 'write {"keys": ['),
        ({}, {"keys": [{"key": "too short, a secret"[:9], "base_model": True}]}, [], "at least 16 are needed"),
        ({}, {"keys": [{"key": "a" * 16, "base_model": True, "requests_per_minute": 3}]}, [], "which the server keeps"),
        ({}, {"keys": [{"key": "a" * 16, "base_model": True, "weight": 2.0}]}, [], "--forward-keys, or leave them out"),
        ({}, None, ["--forward-keys"], "--forward-keys needs --api-keys"),
        ({}, None, ["--allow-host", "chat.example"], "give --console, too"),
        ({}, None, ["--trusted-proxy", "*"], "--trusted-proxy is '*'; write an address"),
        ({}, None, ["--trusted-proxy", "10.0.0.7/8"], "10.0.0.7/8 has host bits set"),
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
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    result = run()

    assert (result.exit_code, served) == (1, [])
    assert "fastapi and prometheus_client and uvicorn missing" in result.stderr
    assert "./client[openai]" in result.stderr
