"""What quickstart says before it begins. It is run whole by hand, its failures by scripts/run try_first_minutes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import quickstart
from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver import ServerOptions


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "check_memory", lambda *_: None)
    monkeypatch.setattr(quickstart, "needs_compiler", lambda: False)


@pytest.mark.usefixtures("roomy")
def test_a_taken_port_is_told_with_the_option_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        defaults = ServerOptions(model=Path(), http_port=port, grpc_port=0, metrics_port=0)
        monkeypatch.setattr(quickstart, "ServerOptions", lambda model: defaults)
        with pytest.raises(ConfigError, match=rf"^HTTP port {port} on 127.0.0.1: Address already in use; --free-ports"):
            quickstart.check_machine(is_default_model=True, free_ports=False)
        quickstart.check_machine(is_default_model=True, free_ports=True)


@pytest.mark.usefixtures("roomy")
def test_a_missing_compiler_is_a_hint_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "needs_compiler", lambda: True)
    quickstart.check_machine(is_default_model=True, free_ports=True)
    assert "apt-get install g++" in capsys.readouterr().err


@pytest.mark.usefixtures("roomy")
def test_a_cache_that_the_server_could_not_open_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTILORA_CACHE", "/volumes/jürgen")
    with pytest.raises(ConfigError, match=r"^/volumes/jürgen: .*ASCII.*: set MULTILORA_CACHE$"):
        quickstart.check_machine(is_default_model=True, free_ports=True)
    quickstart.check_machine(is_default_model=False, free_ports=True)


@pytest.mark.usefixtures("roomy")
def test_only_the_default_models_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(quickstart, "check_memory", lambda needed, purpose: asked.append(needed))
    quickstart.check_machine(is_default_model=False, free_ports=True)
    quickstart.check_machine(is_default_model=True, free_ports=True)
    assert asked == [quickstart.NEEDED_MEMORY_BYTES]
