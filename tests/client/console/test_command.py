"""`multilora console`: what it serves, and says."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

from multilora_client.cli import app
from multilora_client.openai import serving

from .conftest import MODEL, PAGE


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["console", *map(str, arguments)])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """What uvicorn was to run, and at which address."""
    calls: list[tuple[Any, Any]] = []
    monkeypatch.setattr(
        uvicorn.Server, "run", lambda server, sockets: calls.append((server.config, sockets[0].getsockname()))
    )
    return calls


def test_it_listens_on_loopback_and_looks_at_the_server(served: list[Any], fake_triton: Any) -> None:
    fake_triton.report = MODEL
    result = run("--url", fake_triton.url, "--port", 0, "--read-only", "--allow-host", "gpu7.example")

    assert result.exit_code == 0, result.output
    ((config, address),) = served
    assert address[0] == "127.0.0.1"
    assert f"console: http://127.0.0.1:{address[1]}/" in result.stderr
    with TestClient(config.app, headers=PAGE, base_url="http://gpu7.example") as console:
        about = console.get("/console/api/about").json()
    assert (about["model"], about["is_read_only"], about["urls"]["grpc"]) == (MODEL, True, fake_triton.url)


def test_a_taken_port_is_said(served: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("--port", taken.getsockname()[1])
    assert (result.exit_code, served) == (1, [])
    assert "Address already in use" in result.stderr


def test_a_certificate_needs_its_key(served: list[Any], tmp_path: Path) -> None:
    result = run("--certificate", tmp_path / "cert.pem")
    assert (result.exit_code, served) == (1, [])
    assert "give both --certificate and --key" in result.stderr


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    result = run()
    assert (result.exit_code, served) == (1, [])
    assert "./client[openai]" in result.stderr
