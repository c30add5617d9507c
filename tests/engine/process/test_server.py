from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from support.adapters import TINY, wire_adapter
from support.fake_engine import BUG, FAIL_STEP, HOLD, FakeEngine
from support.fronts import TIMEOUT_S, RecordingListener, generation_request
from support.served_engine import new_heartbeat, served
from support.sources import NO_BASE

from multilora_engine.errors import DeviceDead
from multilora_engine.lora.adapter_events import AdapterEventLog
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.host_tier import HostTier
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.sources import fetcher as fetcher_module
from multilora_engine.lora.sources.directory import DirectorySource
from multilora_engine.lora.sources.fetcher import AdapterFetcher
from multilora_engine.process.client import EngineClient
from multilora_engine.process.liveness import DrainOrder, Heartbeat, heartbeat_file
from multilora_engine.process.messages import (
    MAX_QUEUED_MESSAGES,
    PROTOCOL_VERSION,
    Abort,
    Add,
    FromEngine,
    Hello,
    Outputs,
    Refused,
    ToEngine,
    Welcome,
    decode_from_engine,
    encode,
)
from multilora_engine.process.operations import ReadStats, StatsReport
from multilora_engine.process.server import serve
from multilora_engine.process.telemetry import AdapterUsage
from multilora_engine.request import GenerationRequest, Sender, TokenOutput


class RawFront:
    """A front without manners: sends any bytes, reads any message."""

    def __init__(self, socket_path: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.set(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
        self._socket.connect(f"ipc://{socket_path}")

    def send(self, message: ToEngine | bytes) -> None:
        self._socket.send(message if isinstance(message, bytes) else encode(message))

    def receive(self) -> FromEngine:
        return decode_from_engine(memoryview(self._socket.recv()))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def front(engine: FakeEngine, socket_path: Path) -> Iterator[RawFront]:
    front = RawFront(socket_path)
    yield front
    front.close()


def test_a_step_that_raises_fails_the_requests_in_it_and_later_ones_are_served(client: EngineClient) -> None:
    failing, caught, later = (RecordingListener() for _ in range(3))
    client.generate(caught, [generation_request("caught", [HOLD])])
    client.generate(failing, [generation_request("failing", [FAIL_STEP])])
    for listener in (failing, caught):
        final = listener.wait()[-1]
        assert final.error_code == "INTERNAL"
        assert "the device is on fire" in (final.error_message or "")
    client.generate(later, [generation_request("later", [1])])
    assert later.wait()[-1].finish_reason == "length"


def error_that_ends(engine: FakeEngine, socket_path: Path, send: Callable[[EngineClient], None]) -> Exception:
    """The error that ends an engine after a client has sent something."""
    parent_fd, writer_fd = os.pipe()
    raised: list[Exception] = []
    drain = DrainOrder(socket_path)

    def run() -> None:
        try:
            serve(engine, socket_path, parent_fd, AdapterUsage(max_adapters=2), new_heartbeat(), drain)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    client = EngineClient(socket_path)
    client.wait_until_ready(TIMEOUT_S)
    send(client)
    thread.join(TIMEOUT_S)
    client.close()
    drain.close()
    os.close(parent_fd)
    os.close(writer_fd)
    (error,) = raised
    return error


def test_an_engine_whose_steps_keep_failing_ends(socket_path: Path) -> None:
    class Broken(FakeEngine):
        def step(self, on_progress: Callable[[], None]) -> list[object]:
            raise RuntimeError("the device is gone for good")

        def abort(self, request_id: str) -> None:
            return None

    listener = RecordingListener()
    error = error_that_ends(
        Broken(), socket_path, lambda client: client.generate(listener, [generation_request("r", [1])])
    )
    assert str(error) == "the device is gone for good"
    assert len(listener.wait()) == 1


@pytest.mark.parametrize("first_token", [FAIL_STEP, BUG])
def test_an_engine_whose_device_is_dead_ends_at_once(socket_path: Path, first_token: int) -> None:
    """After a step, or the acceptance of one request: not one request more is lost than those in flight."""
    engine, listener = FakeEngine(), RecordingListener()
    engine.has_dead_device = True
    error = error_that_ends(
        engine, socket_path, lambda client: client.generate(listener, [generation_request("r", [first_token])])
    )
    assert isinstance(error, DeviceDead)
    assert str(error).startswith("the device is dead after RuntimeError: ")
    assert [output.error_code for output in listener.wait()] == ["UNAVAILABLE"]


def test_the_requests_of_a_front_that_is_gone_are_aborted(
    engine: FakeEngine, front: RawFront, client: EngineClient
) -> None:
    engine.step_gate.clear()
    front.send(Hello(PROTOCOL_VERSION))
    assert isinstance(front.receive(), Welcome)
    front.send(Add([generation_request("silent", [HOLD]), generation_request("talking", [1], max_tokens=10**6)]))
    front.close()
    engine.step_gate.set()
    with engine.changed:
        assert engine.changed.wait_for(lambda: set(engine.aborted) == {"silent", "talking"}, TIMEOUT_S)
    listener = RecordingListener()
    client.generate(listener, [generation_request("r", [1])])
    assert listener.wait()[-1].finish_reason == "length"


def test_a_front_gets_one_message_a_step(engine: FakeEngine, front: RawFront) -> None:
    front.send(Hello(PROTOCOL_VERSION))
    front.receive()
    front.send(Add([generation_request(name, [1], max_tokens=2) for name in "abc"]))
    for _ in range(2):
        message = front.receive()
        assert isinstance(message, Outputs)
        assert [output.request_id for output in message.outputs] == ["a", "b", "c"]


def test_a_front_that_does_not_read_delays_nobody_and_gets_everything_when_it_does(
    engine: FakeEngine, front: RawFront, client: EngineClient
) -> None:
    front.send(Hello(PROTOCOL_VERSION))
    front.receive()
    num_steps, names = 300, [f"slow {i}" for i in range(64)]
    engine.step_gate.clear()
    front.send(Add([generation_request(name, [7, 8, 9], max_tokens=num_steps) for name in names]))
    engine.step_gate.set()
    with engine.changed:
        assert engine.changed.wait_for(lambda: len(engine.produced) == 64 and not engine.requests, TIMEOUT_S)
    listener = RecordingListener()
    client.generate(listener, [generation_request("r", [1])])
    assert listener.wait()[-1].finish_reason == "length"

    answers: dict[str, list[TokenOutput]] = {name: [] for name in names}
    num_messages = 0
    while not all(outputs and outputs[-1].is_final for outputs in answers.values()):
        message = front.receive()
        assert isinstance(message, Outputs)
        num_messages += 1
        for output in message.outputs:
            answers[output.request_id].append(output)
    assert num_messages < num_steps
    for outputs in answers.values():
        assert [token for output in outputs for token in output.token_ids] == [7, 8, 9] * (num_steps // 3)
        assert "".join(output.text for output in outputs) == "<7><8><9>" * (num_steps // 3)
        assert [output.is_final for output in outputs].index(True) == len(outputs) - 1


def test_nothing_is_accepted_before_a_hello(engine: FakeEngine, front: RawFront) -> None:
    front.send(Add([generation_request("r", [1])]))
    assert front.receive() == Refused("the first message must be Hello")
    assert engine.produced == {}


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x80", encode(Refused("not for the engine"))])
def test_garbage_is_refused_and_the_server_goes_on(engine: FakeEngine, front: RawFront, garbage: bytes) -> None:
    front.send(garbage)
    assert isinstance(front.receive(), Refused)
    front.send(Hello(PROTOCOL_VERSION))
    assert isinstance(front.receive(), Welcome)


def test_aborting_what_is_unknown_or_has_ended_does_nothing(engine: FakeEngine, front: RawFront) -> None:
    front.send(Hello(PROTOCOL_VERSION))
    front.receive()
    front.send(Add([generation_request("r", [1], max_tokens=1)]))
    front.receive()
    front.send(Abort(["r", "never heard of"]))
    front.send(Hello(PROTOCOL_VERSION))
    assert isinstance(front.receive(), Welcome)
    assert engine.aborted == []


class ObservedHeartbeat(Heartbeat):
    """Tells when it has beaten five times."""

    def __init__(self, fd: int, interval_s: float) -> None:
        super().__init__(fd, interval_s)
        self.has_beaten = threading.Event()

    def beat(self) -> None:
        super().beat()
        if self.count == 5:
            self.has_beaten.set()


def test_an_idle_engine_goes_on_beating(socket_path: Path) -> None:
    fd = heartbeat_file()
    heartbeat = ObservedHeartbeat(fd, interval_s=0.01)
    os.close(fd)
    assert heartbeat.count == 0
    with served(FakeEngine(), socket_path, heartbeat):
        assert heartbeat.has_beaten.wait(TIMEOUT_S)


def test_an_idle_engine_takes_up_what_a_watched_folder_tells(
    socket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "_SCAN_INTERVAL_S", 0.01)
    is_told = threading.Event()
    monkeypatch.setattr(AdapterEventLog, "append", lambda log, event: is_told.set())
    source = DirectorySource(str(tmp_path), watch=True)
    engine = FakeEngine(fetcher=AdapterFetcher({"watched": source}, TINY, NO_BASE))
    with served(engine, socket_path):
        (tmp_path / "half").mkdir()
        (tmp_path / "half" / "adapter_config.json").touch()
        assert is_told.wait(TIMEOUT_S)
    engine.remote.close()


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_an_upload_is_acknowledged_once_its_file_is_written(
    engine: FakeEngine, client: EngineClient, tmp_path: Path, is_disk_full: bool
) -> None:
    may_write, files = threading.Event(), []

    def write_file(path: Path, *_: object) -> None:
        assert may_write.wait(TIMEOUT_S)
        if is_disk_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        files.append(path.name)

    host = HostTier(num_pages=8, page_bytes=TINY.page_bytes)
    disk = DiskTier(tmp_path / "cache", 1 << 20, TINY, write_file=write_file)
    engine.loras = LoRAManager(host, DeviceTier(TINY, host.pool, host.pool, max_loras=8), "refuse", disk=disk)
    upload, ask, wire = RecordingListener(), RecordingListener(), wire_adapter(TINY, [(1, 0, 4)])
    client.put_adapter(upload, "upload", 7, pack_adapter(wire.weights, wire.config, TINY))
    client.generate(ask, [generation_request("ask", [5], lora_task_id=7)])
    assert ask.wait()[-1].finish_reason == "length"
    assert upload.outputs == []
    may_write.set()
    (answer,) = upload.wait()
    if is_disk_full:
        assert answer.error_code == "UNAVAILABLE"
        assert "LoRA task 7 is cached in memory only" in (answer.error_message or "")
    else:
        assert (answer.error_code, files) == (None, ["7.safetensors"])
    disk.close()


def test_each_request_of_a_refused_message_is_counted_once(socket_path: Path) -> None:
    with served(FakeEngine(), socket_path):
        client, listener, reader = EngineClient(socket_path), RecordingListener(), RecordingListener()
        client.wait_until_ready(TIMEOUT_S)
        bad = generation_request("bad", [1], max_tokens=0)
        client.generate(listener, [generation_request("good", [HOLD]), bad, generation_request("never", [1])])
        listener.wait()
        client.operate(reader, "stats", ReadStats())
        report = msgspec.json.decode(reader.wait()[-1].text, type=StatsReport)
        client.close()
    assert report.load.requests.requests == {"cancelled": 1, "INVALID_ARG": 2}


def test_the_canarys_requests_are_not_counted_and_not_logged(
    socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def canary(request_id: str, *ids: int, max_tokens: int = 2) -> GenerationRequest:
        request = generation_request(request_id, list(ids), max_tokens=max_tokens)
        return msgspec.structs.replace(request, sender=Sender(is_canary=True))

    with served(FakeEngine(), socket_path):
        client, reader = EngineClient(socket_path), RecordingListener()
        client.wait_until_ready(TIMEOUT_S)
        for request in (canary("one", 1), generation_request("two", [1], max_tokens=2), canary("bad", 1, max_tokens=0)):
            listener = RecordingListener()
            client.generate(listener, [request])
            listener.wait()
        client.generate(RecordingListener(), [canary("left", HOLD)])
        client.operate(reader, "stats", ReadStats())
        report = msgspec.json.decode(reader.wait()[-1].text, type=StatsReport)
        client.close()
    assert report.load.requests.requests == {"length": 1}
    assert report.load.requests.output_tokens == 2
    assert sum(": length, " in record.getMessage() for record in caplog.records) == 1
