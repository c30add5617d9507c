"""What quickstart says before it begins. It is run whole by hand, its failures by scripts/run try_first_minutes."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from multilora_client.errors import InvalidRequest
from multilora_engine.errors import ConfigError
from multilora_engine.quickstart import command
from multilora_engine.tritonserver import ServerOptions
from multilora_wire.adapter_names import task_id_of_name


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check_memory", lambda *_: None)
    monkeypatch.setattr(command, "needs_compiler", lambda: False)


@pytest.mark.usefixtures("roomy")
def test_a_taken_port_is_told_with_the_option_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        defaults = ServerOptions(model=Path(), http_port=port, grpc_port=0, metrics_port=0)
        monkeypatch.setattr(command, "ServerOptions", lambda model: defaults)
        with pytest.raises(ConfigError, match=rf"^HTTP port {port} on 127.0.0.1: Address already in use; --free-ports"):
            command.check_machine(is_default_model=True, free_ports=False)
        command.check_machine(is_default_model=True, free_ports=True)


@pytest.mark.usefixtures("roomy")
def test_a_missing_compiler_is_a_hint_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "needs_compiler", lambda: True)
    command.check_machine(is_default_model=True, free_ports=True)
    assert "apt-get install g++" in capsys.readouterr().err


@pytest.mark.usefixtures("roomy")
def test_a_cache_that_the_server_could_not_open_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTILORA_CACHE", "/volumes/jürgen")
    with pytest.raises(ConfigError, match=r"^/volumes/jürgen: .*ASCII.*: set MULTILORA_CACHE$"):
        command.check_machine(is_default_model=True, free_ports=True)
    command.check_machine(is_default_model=False, free_ports=True)


@pytest.mark.usefixtures("roomy")
def test_only_the_default_models_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(command, "check_memory", lambda needed, purpose: asked.append(needed))
    command.check_machine(is_default_model=False, free_ports=True)
    command.check_machine(is_default_model=True, free_ports=True)
    assert asked == [command.NEEDED_MEMORY_BYTES]


def test_a_model_without_a_chat_template_is_asked_by_plain_text() -> None:
    chat, plain = command.Question("Why?", is_chat=True), command.Question("Why?", is_chat=False)
    assert (chat.prompt, chat.messages) == (None, [{"role": "user", "content": "Why?"}])
    assert (plain.prompt, plain.messages) == ("Why?", None)
    assert chat.json_fields == {"messages": '[{"role": "user", "content": "Why?"}]'}
    assert plain.json_fields == {"text_input": "Why?"}


def test_two_quickstarts_do_not_write_into_the_same_log(tmp_path: Path) -> None:
    folder = tmp_path / "not there yet"
    with command.open_log(folder) as first, command.open_log(folder) as second:
        print("one", file=first)
        print("two", file=second)
        assert [Path(log.name).name for log in (first, second)] == ["quickstart.log", "quickstart-2.log"]
    with command.open_log(folder) as third:
        print("three", file=third)
    assert (folder / "quickstart.log").read_text() == "three\n"
    assert (folder / "quickstart-2.log").read_text() == "two\n"


def test_sample_adapters_go_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "misfit", lambda *_: None)
    adapters = command.sample_adapters(Path())
    assert {name: adapter.lora_task_id for name, adapter in adapters.items()} == {
        name: task_id_of_name(name) for name in ("pirate", "json", "emoji", "judge")
    }


def test_an_error_of_a_client_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise InvalidRequest("this model has no chat template")

    class Server:
        """Starts nothing."""

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setenv("MULTILORA_CACHE", str(tmp_path))
    monkeypatch.setattr(command, "resolve_checkpoint", Path)
    monkeypatch.setattr(command, "read_tokenizer", lambda _: SimpleNamespace(has_chats=True))
    monkeypatch.setattr(command, "sample_adapters", lambda _: {})
    monkeypatch.setattr(command, "ServerProcess", Server)
    monkeypatch.setattr(command, "wait_ready", lambda _: None)
    monkeypatch.setattr(command, "demonstrate", refuse)
    with pytest.raises(typer.Exit):
        command.main(once=True, model=str(tmp_path), quantize=None, free_ports=True)
    assert "error: [INVALID_ARG] this model has no chat template" in capsys.readouterr().err.splitlines()[-1]
