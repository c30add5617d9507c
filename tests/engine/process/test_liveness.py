from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from support import fake_engine
from support.adapters import TINY, wire_adapter
from support.fake_engine import HOLD
from support.fronts import TIMEOUT_S, RecordingListener, generation_request

from multilora_engine.lora.format import pack_adapter
from multilora_engine.process.client import EngineClient
from multilora_engine.process.liveness import LOOKS_PER_TIMEOUT, Heartbeat, Pulse, drain_engine, heartbeat_file
from multilora_engine.process.messages import Launch, Started


def test_who_reads_sees_what_who_writes_counts() -> None:
    fd = heartbeat_file()
    writer, reader = Heartbeat(fd, None), Heartbeat(fd, None)
    os.close(fd)
    assert reader.count == 0
    for _ in range(3):
        writer.beat()
    assert reader.count == 3


STILL = LOOKS_PER_TIMEOUT


@pytest.mark.parametrize(
    ("counts", "has_stopped"),
    [
        ([0] * 100 * STILL, False),
        ([0, 0, *[1] * STILL], False),
        ([0, 0, *[1] * (STILL + 1)], True),
        ([0, *[7] * STILL, *[8] * STILL], False),
        ([*range(1, 100), *[100] * (STILL + 1)], True),
    ],
    ids=["a long load", "not yet", "after the first beat", "a beat in time", "after many beats"],
)
def test_a_pulse_has_stopped_after_so_many_looks_without_a_beat(counts: list[int], has_stopped: bool) -> None:
    pulse = Pulse()
    looks = [pulse.has_stopped(count) for count in counts]
    assert looks == [False] * (len(counts) - 1) + [has_stopped]


@pytest.fixture
def engine_pid(socket_path: Path, tmp_path: Path) -> Iterator[int]:
    """A fake engine in a process of its own, once fronts can connect."""
    (tmp_path / "config.json").write_text("{}")
    fd = heartbeat_file()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, fake_engine.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        pass_fds=(fd,),
    ) as process:
        os.close(fd)
        assert process.stdin is not None
        assert process.stdout is not None
        launch = Launch({"model_path": str(tmp_path)}, str(socket_path), fd, heartbeat_interval_s=None)
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.flush()
        assert msgspec.json.decode(process.stdout.readline(), type=Started) == Started()
        yield process.pid


@pytest.fixture
def client(engine_pid: int, socket_path: Path) -> Iterator[EngineClient]:
    client = EngineClient(socket_path)
    client.wait_until_ready(TIMEOUT_S)
    yield client
    client.close()


def error_of_a_new_request(client: EngineClient) -> str | None:
    listener = RecordingListener()
    client.generate(listener, [generation_request("new", [1])])
    return listener.wait()[-1].error_message


def error_of_an_upload(client: EngineClient) -> str | None:
    listener, wire = RecordingListener(), wire_adapter(TINY, [(1, 0, 4)])
    client.put_adapter(listener, "upload", 7, pack_adapter(wire.weights, wire.config, TINY))
    return listener.wait()[-1].error_message


def test_a_drained_engine_refuses_what_is_new_and_is_done_when_the_last_request_has_ended(
    engine_pid: int, client: EngineClient, socket_path: Path
) -> None:
    last = RecordingListener()
    client.generate(last, [generation_request("last", [HOLD])], client_request_id="last")
    assert error_of_a_new_request(client) is None, "the engine takes requests in order, so it has both"
    with ThreadPoolExecutor() as pool:
        drained = pool.submit(drain_engine, engine_pid, socket_path, TIMEOUT_S)
        while error_of_a_new_request(client) is None:
            """The signal is on its way."""
        assert error_of_a_new_request(client) == "the server is shutting down"
        assert error_of_an_upload(client) == "the server is shutting down"
        assert not drained.done()
        assert last.outputs == []
        client.stop(RecordingListener(), "stop", "last")
        assert drained.result(TIMEOUT_S)
    assert [output.finish_reason for output in last.wait()] == ["cancelled"]
    assert error_of_a_new_request(client) == "the server is shutting down"


def test_an_idle_engine_is_drained_at_once(engine_pid: int, client: EngineClient, socket_path: Path) -> None:
    assert drain_engine(engine_pid, socket_path, TIMEOUT_S)


def test_nobody_waits_for_an_engine_that_dies_nor_longer_than_told(
    engine_pid: int, client: EngineClient, socket_path: Path
) -> None:
    endless = RecordingListener()
    client.generate(endless, [generation_request("endless", [HOLD])])
    assert error_of_a_new_request(client) is None
    assert not drain_engine(engine_pid, socket_path, timeout_s=0.1)
    with ThreadPoolExecutor() as pool:
        drained = pool.submit(drain_engine, engine_pid, socket_path, TIMEOUT_S)
        os.kill(engine_pid, signal.SIGKILL)
        assert not drained.result(TIMEOUT_S)
