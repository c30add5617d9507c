from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import fake_engine
from support.fake_engine import DIE, HANG, HOLD, KILL_DEVICE
from support.fronts import TIMEOUT_S, RecordingListener, generation_request

from multilora_engine.errors import ConfigError
from multilora_engine.process import supervisor
from multilora_engine.process.client import EngineClient
from multilora_engine.process.liveness import heartbeat_file
from multilora_engine.process.messages import Launch, Started
from multilora_engine.process.supervisor import EngineProcess, keep_alive
from multilora_engine.request import TokenOutput

COMMAND = [sys.executable, fake_engine.__file__]
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

EngineProcessFactory = Callable[..., EngineProcess]


@pytest.fixture
def parameters(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "config.json").write_text("{}")
    return {"model_path": str(tmp_path)}


@pytest.fixture
def engine_process(parameters: dict[str, str], socket_path: Path) -> Iterator[EngineProcessFactory]:
    started: list[EngineProcess] = []

    def make(command: list[str] = COMMAND, hang_timeout_s: float = 0.0, **more: str) -> EngineProcess:
        started.append(EngineProcess(parameters | more, socket_path, ENVIRON, command, hang_timeout_s))
        return started[-1]

    yield make
    for process in started:
        process.close()


def test_a_dead_engine_fails_what_is_in_flight_once_and_the_next_one_serves_until_it_is_closed(
    engine_process: EngineProcessFactory, socket_path: Path
) -> None:
    process = engine_process()
    process.start()
    client = EngineClient(socket_path)
    client.wait_until_ready(TIMEOUT_S)
    waiting, deadly, later, last = (RecordingListener() for _ in range(4))
    client.generate(waiting, [generation_request("waiting", [HOLD])])
    client.generate(deadly, [generation_request("deadly", [DIE])])
    assert [output.error_code for output in waiting.wait()] == ["UNAVAILABLE"]
    assert [output.error_code for output in deadly.wait()] == ["UNAVAILABLE"]

    client.wait_until_ready(TIMEOUT_S)
    assert process.generation == 2
    client.generate(later, [generation_request("later", [1])])
    assert later.wait()[-1].finish_reason == "length"
    assert (waiting.num_ends, deadly.num_ends, client.num_requests) == (0, 0, 0)

    client.generate(last, [generation_request("last", [HOLD])])
    process.close()
    assert [output.error_code for output in last.wait()] == ["UNAVAILABLE"]
    assert process.generation == 2
    client.close()


def test_one_failed_step_on_a_dead_device_ends_the_engine_and_the_next_one_serves(
    engine_process: EngineProcessFactory, socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = engine_process()
    process.start()
    client = EngineClient(socket_path)
    client.wait_until_ready(TIMEOUT_S)
    waiting, deadly, later = (RecordingListener() for _ in range(3))
    client.generate(waiting, [generation_request("waiting", [HOLD])])
    client.generate(deadly, [generation_request("deadly", [KILL_DEVICE])])
    assert [output.error_code for output in waiting.wait()] == ["UNAVAILABLE"]
    assert [output.error_code for output in deadly.wait()] == ["UNAVAILABLE"]
    client.wait_until_ready(TIMEOUT_S)
    client.generate(later, [generation_request("later", [1])])
    assert later.wait()[-1].finish_reason == "length"
    assert process.generation == 2
    assert "engine 1 ended with status 1" in caplog.text
    client.close()


def test_a_hung_engine_is_killed_fails_what_is_in_flight_and_the_next_one_serves(
    engine_process: EngineProcessFactory, socket_path: Path
) -> None:
    process = engine_process(hang_timeout_s=2.0)
    process.start()
    client = EngineClient(socket_path)
    client.wait_until_ready(TIMEOUT_S)
    hanging = RecordingListener()
    client.generate(hanging, [generation_request("hanging", [HANG])])
    assert [output.error_code for output in hanging.wait()] == ["UNAVAILABLE"]
    assert wait_until_answered(client)[-1].finish_reason == "length"
    assert process.generation >= 2
    client.close()


def wait_until_answered(client: EngineClient) -> list[TokenOutput]:
    """The outputs of the first request that an engine lives long enough for: a busy machine's may seem to hang, too."""
    while True:
        client.wait_until_ready(TIMEOUT_S)
        listener = RecordingListener()
        client.generate(listener, [generation_request("later", [1])])
        if (outputs := listener.wait())[-1].error_code != "UNAVAILABLE":
            return outputs


@pytest.fixture
def start_failed() -> Iterator[threading.Event]:
    """Set when the supervisor tells that an engine cannot start."""
    told = threading.Event()
    handler = logging.Handler(logging.ERROR)
    handler.addFilter(lambda record: "cannot start" in record.getMessage())
    handler.emit = lambda record: told.set()  # type: ignore[method-assign]
    logger = logging.getLogger(supervisor.__name__)
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


def test_an_engine_that_cannot_start_again_is_tried_until_it_can(
    engine_process: EngineProcessFactory, socket_path: Path, parameters: dict[str, str], start_failed: threading.Event
) -> None:
    process = engine_process(hang_timeout_s=30.0)
    process.start()
    client, deadly, later = EngineClient(socket_path), RecordingListener(), RecordingListener()
    client.wait_until_ready(TIMEOUT_S)
    config = Path(parameters["model_path"], "config.json")
    config.rename(config.with_suffix(".gone"))
    client.generate(deadly, [generation_request("deadly", [DIE])])
    deadly.wait()
    assert start_failed.wait(TIMEOUT_S)
    config.with_suffix(".gone").rename(config)
    client.wait_until_ready(TIMEOUT_S)
    client.generate(later, [generation_request("later", [1])])
    assert later.wait()[-1].finish_reason == "length"
    client.close()


@pytest.mark.parametrize("broken", ["heartbeat_file", "Heartbeat", "_await_start"])
def test_whatever_keeps_an_engine_from_starting_again_it_is_tried_until_it_does(
    engine_process: EngineProcessFactory, socket_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    process = engine_process()
    process.start()
    client, deadly, later = EngineClient(socket_path), RecordingListener(), RecordingListener()
    client.wait_until_ready(TIMEOUT_S)
    works, failures = getattr(supervisor, broken), iter([OSError(24, "Too many open files")])

    def fail_once(*arguments: Any) -> Any:
        for failure in failures:
            raise failure
        return works(*arguments)

    monkeypatch.setattr(supervisor, broken, fail_once)
    client.generate(deadly, [generation_request("deadly", [DIE])])
    deadly.wait()
    client.wait_until_ready(TIMEOUT_S)
    client.generate(later, [generation_request("later", [1])])
    assert later.wait()[-1].finish_reason == "length"
    assert process.generation == 3
    client.close()


def test_an_engine_that_cannot_be_watched_for_a_moment_is_watched_again(
    engine_process: EngineProcessFactory, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, works = threading.Event(), os.pidfd_open

    def fail_once(pid: int) -> int:
        if failed.is_set():
            return works(pid)
        failed.set()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail_once)
    process = engine_process()
    process.start()
    assert failed.wait(TIMEOUT_S)
    client, deadly, later = EngineClient(socket_path), RecordingListener(), RecordingListener()
    client.wait_until_ready(TIMEOUT_S)
    client.generate(deadly, [generation_request("deadly", [DIE])])
    deadly.wait()
    client.wait_until_ready(TIMEOUT_S)
    client.generate(later, [generation_request("later", [1])])
    assert later.wait()[-1].finish_reason == "length"
    client.close()


@pytest.mark.parametrize(
    ("num_threads", "reason"),
    [("13", "^parameter num_threads=13: unlucky$"), ("14", "^RuntimeError: no such device$")],
)
def test_why_an_engine_cannot_start_is_told_in_its_own_words(
    engine_process: EngineProcessFactory, num_threads: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        engine_process(num_threads=num_threads).start()


def test_an_engine_that_ends_without_a_word_is_an_error(engine_process: EngineProcessFactory) -> None:
    with pytest.raises(ConfigError, match="ended with status 7 before it was ready"):
        engine_process(command=[sys.executable, "-c", "raise SystemExit(7)"]).start()


def test_an_engine_ends_with_its_parent(parameters: dict[str, str], socket_path: Path) -> None:
    fd = heartbeat_file()
    launch = msgspec.json.encode(Launch(parameters, str(socket_path), fd, heartbeat_interval_s=None))
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRON, pass_fds=(fd,))
    os.close(fd)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(launch + b"\n")
    process.stdin.flush()
    assert msgspec.json.decode(process.stdout.readline(), type=Started) == Started()
    process.stdin.close()
    assert process.wait(TIMEOUT_S) == 0
    process.stdout.close()


def _pauses(lives_s: list[float], max_restarts: float = math.inf) -> list[float]:
    """The pauses between the lives of a process whose lives take these seconds; the last pause ends it all."""
    lives, pauses = iter(lives_s), []

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == len(lives_s)

    keep_alive(lambda: next(lives), pause, max_restarts)
    return pauses


def test_it_waits_longer_for_each_death_in_a_row_up_to_a_bound() -> None:
    assert _pauses([1.0] * 9) == [0, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_process_that_lived_for_a_while_begins_a_new_row() -> None:
    assert _pauses([1, 1, 1, 61, 1, 1]) == [0, 1, 2, 0, 1, 2]


def test_after_so_many_deaths_in_a_row_there_is_no_other_life() -> None:
    assert _pauses([1.0] * 9, max_restarts=2) == [0, 1]
    assert _pauses([61.0] * 5, max_restarts=1) == [0] * 5
    assert _pauses([61.0] * 5, max_restarts=0) == []
