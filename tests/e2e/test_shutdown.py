"""The ends of servers: by SIGTERM while clients keep their streams open, and by SIGKILL."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import grpc
import psutil
import pytest
from support.fronts import TIMEOUT_S
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from multilora_engine.process.paths import ENGINE_MODULE
from multilora_engine.tritonserver import ServerProcess
from multilora_engine.tritonserver.server_process import marked_processes
from servers.tiny_server import save_tiny_model, tiny_server
from trials.doors import infer_request


def engine_of(server: ServerProcess) -> psutil.Process:
    processes = map(psutil.Process, marked_processes(server.token))
    return next(process for process in processes if ENGINE_MODULE in process.cmdline())


def has_ended(process: psutil.Process) -> bool:
    """Whoever is the parent of orphans on this machine may leave a zombie of it."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture(
    params=[
        "multilora-serve",
        pytest.param(
            "tritonserver", marks=pytest.mark.long(reason="a server of its own; it dies with multilora-serve, too")
        ),
    ]
)
def orphans(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[psutil.Process, list[psutil.Process]]]:
    """A process of a server, and all processes that it has started, and they."""
    serve = [sys.executable, "-m", "multilora_engine.tritonserver.launch", "--http-port=0", "--grpc-port=0"]
    serve += ["--metrics-port=0", f"--model={save_tiny_model(tmp_path)}", "--canary-interval-secs=0"]
    with subprocess.Popen([*serve, "--set=num_threads=1", "--set=kv_cache_memory_bytes=16MiB"], stderr=PIPE) as command:
        assert command.stderr is not None
        assert any(b"gRPC" in line for line in command.stderr), "ready"
        killed = psutil.Process(command.pid)
        if request.param == "tritonserver":
            (killed,) = killed.children()
        started = killed.children(recursive=True)
        yield killed, started
        command.kill()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def test_whatever_a_killed_process_of_a_server_has_started_ends(
    orphans: tuple[psutil.Process, list[psutil.Process]],
) -> None:
    killed, started = orphans
    assert any(ENGINE_MODULE in process.cmdline() for process in started)
    assert len(started) >= 6  # the models' processes and the engine
    killed.kill()
    for process in started:
        wait_for_end(process)


def wait_for_end(process: psutil.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(process.pid)
        assert select.select([fd], [], [], TIMEOUT_S)[0], process
        os.close(fd)


def test_a_server_ends_in_order_though_a_stream_is_open_and_its_engine_was_restarted() -> None:
    request = infer_request("generation", text_input=[["Hello"]], max_tokens=[[100]], end_id=[[-1]], streaming=[[True]])
    with tiny_server() as (server, _):
        os.kill(engine_of(server).pid, signal.SIGKILL)
        server.wait_ready()
        engine = engine_of(server)
        requests: queue.SimpleQueue[service_pb2.ModelInferRequest] = queue.SimpleQueue()
        with grpc.insecure_channel(server.grpc_url) as channel:
            answers = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(requests.get, None))
            requests.put(request)
            assert next(answers).error_message == ""
            assert server.stop() == 0
            assert has_ended(engine)
            requests.put(None)
