"""Starts the real tritonserver, with a model of ten lines."""

import os
import signal
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from multilora_engine.tritonserver import ServerFailed, ServerOptions, ServerProcess, server_process
from multilora_engine.tritonserver.installation import find_installation
from multilora_engine.tritonserver.shared_memory import SHARED_MEMORY


def echo(http_url: str) -> bytes:
    tensor = InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"hello"], dtype=object))
    with InferenceServerClient(http_url) as client:
        answer: bytes = client.infer("echo", [tensor]).as_numpy("OUT")[0]
    return answer


def check_echo(http_url: str) -> None:
    assert echo(http_url) == b"hello"


def server_of(repository: Path) -> ServerProcess:
    options = ServerOptions(
        model_repository=repository, http_port=0, grpc_port=0, metrics_port=0, startup_timeout_s=120, exit_timeout_s=20
    )
    return ServerProcess(options, probe=check_echo)


def shared_memory_of(token: str) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"*{token}*"))


def processes_of(token: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MULTILORA_SERVER") == token:
                found.append(process.pid)
    return found


def test_a_server_answers_until_it_is_stopped_and_leaves_nothing_behind(echo_repository: Path) -> None:
    with server_of(echo_repository) as server:
        server.wait_ready()
        assert echo(server.http_url) == b"hello"
        token = server.token
        # The server and the model's own process; a lock and the model's region.
        assert len(processes_of(token)) == 2
        assert len(shared_memory_of(token)) == 2
        assert server.stop() == 0
    assert processes_of(token) == []
    assert shared_memory_of(token) == []


def test_models_do_not_have_dozens_of_threads_each(echo_repository: Path) -> None:
    num_instances = 4
    config = echo_repository / "echo" / "config.pbtxt"
    config.write_text(config.read_text().replace("kind: KIND_CPU", f"kind: KIND_CPU count: {num_instances}"))
    with server_of(echo_repository) as server:
        server.wait_ready()
        assert psutil.Process(server.pid).num_threads() < 32 * num_instances


def test_clients_cannot_reach_the_shared_memory_api(echo_repository: Path) -> None:
    with server_of(echo_repository) as server:
        server.wait_ready()
        with InferenceServerClient(server.http_url) as client, pytest.raises(InferenceServerException) as refused:
            client.get_system_shared_memory_status()
        assert "403" in str(refused.value)


def test_a_failing_load_is_reported_in_the_words_of_the_model(
    echo_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO_FAILURE", 'parameter max_num_seqs="0": write a number >= 1')
    with server_of(echo_repository) as server, pytest.raises(ServerFailed) as failed:
        server.wait_ready()
    assert str(failed.value).startswith('echo: ConfigError: parameter max_num_seqs="0": write a number >= 1 (')
    assert shared_memory_of(server.token) == []


def test_what_outlives_a_killed_server_is_removed(echo_repository: Path) -> None:
    with server_of(echo_repository) as server:
        server.wait_ready()
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        assert str(server.failure(server.wait())).startswith("tritonserver was ended by signal 9 (Killed), after: ")
        assert processes_of(server.token) == []
        assert shared_memory_of(server.token) == []


@pytest.mark.parametrize("name", ["re po", "Модели", "a$(false)&b;'c"])
def test_any_path_of_repository_and_temporary_files_serves(
    echo_repository: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    repository = echo_repository.rename(echo_repository.with_name(name))
    temporary = repository.with_name(f"{name} tmp")
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with server_of(repository) as server:
        server.wait_ready()
        assert echo(server.http_url) == b"hello"


@pytest.mark.parametrize("code", ["os._exit(3)", "os.abort()", "import ctypes; ctypes.string_at(0)"])
def test_a_model_whose_process_dies_in_its_load_is_told_with_its_last_words(echo_repository: Path, code: str) -> None:
    model = echo_repository / "echo" / "1" / "model.py"
    model.write_text(f"import os, sys\nprint('no room', file=sys.stderr, flush=True)\n{code}\n")
    with server_of(echo_repository) as server, pytest.raises(ServerFailed, match=r"echo: Stub .* not healthy.*no room"):
        server.wait_ready()


def test_a_process_that_dies_before_the_server_meets_it_ends_the_start(
    echo_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = tmp_path / "triton_python_backend_stub"
    stub.write_text("#!/bin/sh\necho 'libpython9.so: cannot open shared object file' >&2\nexit 127\n")
    stub.chmod(0o755)
    found = find_installation()
    changed = replace(found, python_backend=(*found.python_backend[:-1], stub))
    monkeypatch.setattr(server_process, "find_installation", lambda _: changed)
    with server_of(echo_repository) as server:
        with pytest.raises(ServerFailed, match=r"died before its load began\. It wrote: libpython9"):
            server.wait_ready()
        server.kill()
