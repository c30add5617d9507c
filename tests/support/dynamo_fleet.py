"""`DynamoFleet`: Dynamo's front with its router, and workers of ours, as processes of this machine.

They find each other by files, and talk over TCP and ZeroMQ: neither etcd nor NATS is needed. Dynamo's publishers of
events listen on all addresses in any case: where the network is not trusted, run this in a namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from multilora_engine.dynamo.updates import EVENTS
from multilora_engine.process.liveness import wait_for_end
from multilora_engine.tritonserver.probe import OverHttp
from repository import REPOSITORY

_LOOPBACK = "127.0.0.1"
_START_TIMEOUT_S = 300.0
_EXIT_TIMEOUT_S = 60.0
_LOOK_INTERVAL_S = 0.1
_PORTS = (20_000, 32_768)
_PORT_TRIALS = 100

_LISTENING = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")


class FleetFailed(Exception):
    """A process of the fleet did not come up, or ended."""


@dataclass
class Worker:
    """name: of its log. system_url: the address at which it tells its health and metrics, and takes adapters.
    is_ready: whether the fleet has waited for it.
    """

    name: str
    system_url: str
    log: Path
    process: subprocess.Popen[bytes]
    is_ready: bool = False

    @property
    def number(self) -> int:
        """The worker's number in the fleet, by which answers name it."""
        told = call(f"{self.system_url}/engine/control/{EVENTS}", {"since": 0})
        return int(told["instance_id"], 16)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric over all series, or over the series that have this label."""
        with urllib.request.urlopen(f"{self.system_url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[ {{]", line) and label in line)

    def kill(self) -> None:
        """End the worker at once, as a loss of power would."""
        self.process.kill()
        self.process.wait(_EXIT_TIMEOUT_S)

    def stop(self) -> int:
        """Ask the worker to end, and wait until it has. Returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_EXIT_TIMEOUT_S)


class DynamoFleet:
    """Ends all its processes when it is left.

    front_options: of `python -m dynamo.frontend`. front_environ: its variables, beside those of all.
    """

    def __init__(
        self,
        model: Path,
        model_name: str,
        front_options: tuple[str, ...] = ("--router-mode", "kv"),
        environ: Mapping[str, str] = MappingProxyType({}),
        front_environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._model = model
        self.model_name = model_name
        self._front_options = front_options
        self._environ = environ
        self._front_environ = front_environ
        self._resources = ExitStack()
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        directory = Path(self._resources.enter_context(tempfile.TemporaryDirectory()))
        self._logs = directory
        self._shared = {
            "DYN_FILE_KV": str(directory / "discovery"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LORA_ENABLED": "true",
            "DYN_LOGGING_DISABLE_ANSI_COLORS": "true",
            "HF_HUB_OFFLINE": "1",
            **self._environ,
        }
        port = free_port()
        self.url = f"http://{_LOOPBACK}:{port}"
        front = ["-m", "dynamo.frontend", "--http-host", _LOOPBACK, "--http-port", str(port), *self._front_options]
        self.front_log = directory / "front.log"
        self._front = self._spawn([sys.executable, *front], self.front_log, self._front_environ)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._resources.close()

    def start_worker(self, parameters: Mapping[str, str]) -> Worker:
        """Start a worker, and do not wait until it is ready. parameters: of its engine."""
        name = f"worker{len(self.workers) + 1}"
        port, log = free_port(), self._logs / f"{name}.log"
        command = [sys.executable, "-m", "multilora_engine.dynamo.main", "--model", str(self._model)]
        command += ["--served-model-name", self.model_name, "--sources-interval-secs", "2"]
        command += _settings(parameters)
        process = self._spawn(command, log, {"DYN_SYSTEM_PORT": str(port)})
        self.workers.append(Worker(name, f"http://{_LOOPBACK}:{port}", log, process))
        return self.workers[-1]

    def start_triton_front(self, parameters: Mapping[str, str]) -> str:
        """Start a Triton server with the fleet behind it, wait until it is ready, and give its address of gRPC."""
        ports, log = [free_port() for _ in range(3)], self._logs / "triton.log"
        command = [str(Path(sys.executable).with_name("multilora-serve")), "--model", str(self._model)]
        command += ["--model-repository", str(REPOSITORY / "model_repository"), "--host", _LOOPBACK]
        names = ("--http-port", "--grpc-port", "--metrics-port")
        command += [part for name, port in zip(names, ports, strict=True) for part in (name, str(port))]
        command += _settings({**parameters, "engine": "dynamo://dynamo"})
        process = self._spawn(command, log, {})

        def front_is_ready() -> bool:
            if process.poll() is not None:
                raise FleetFailed(f"the Triton front ended with status {process.returncode}: {tail(log)}")
            return OverHttp(f"{_LOOPBACK}:{ports[0]}").is_ready()

        self.wait_until(front_is_ready)
        return f"{_LOOPBACK}:{ports[1]}"

    def wait_ready(self, num_workers: int) -> None:
        """Wait until so many workers are ready, and the front has the model. Raises FleetFailed."""
        for worker in self.workers[-num_workers:]:
            self.wait_until(lambda worker=worker: is_healthy(worker.system_url), worker)  # type: ignore[misc]
            worker.is_ready = True
        self.wait_until(lambda: self.model_name in self.models(), self.workers[-1])

    def wait_until(self, holds: Callable[[], bool], worker: Worker | None = None) -> None:
        """Wait until a condition holds, as long as `worker` and the front are alive. Raises FleetFailed."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not holds():
            if worker is not None and worker.process.poll() is not None:
                raise FleetFailed(f"{worker.name} ended with status {worker.process.returncode}: {tail(worker.log)}")
            if self._front.poll() is not None:
                raise FleetFailed(f"the front ended with status {self._front.returncode}: {tail(self.front_log)}")
            if time.monotonic() > deadline:
                raise FleetFailed(f"nothing came of waiting {_START_TIMEOUT_S:g} s: {tail(self.front_log)}")
            wait_for_end((self._front if worker is None else worker.process).pid, _LOOK_INTERVAL_S)

    def ready_workers(self) -> list[Worker]:
        """The workers that became ready, and are alive."""
        return [worker for worker in self.workers if worker.is_ready and worker.process.poll() is None]

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables by which a process finds the fleet."""
        return {**self._shared, **dict.fromkeys(_LISTENING, _LOOPBACK)}

    def models(self) -> list[str]:
        """The names that clients may ask for; none while the front is starting."""
        try:
            listing = call(f"{self.url}/v1/models")
        except (OSError, HTTPException):
            return []
        return [model["id"] for model in listing["data"]]

    def _spawn(self, command: list[str], log: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        addresses = dict.fromkeys(_LISTENING, _LOOPBACK)
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                env={**os.environ, **self._shared, **addresses, **environ},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self._resources.callback(_end, process)
        return process


def _settings(parameters: Mapping[str, str]) -> list[str]:
    return [part for key, value in parameters.items() for part in ("--set", f"{key}={value}")]


def call(url: str, body: Mapping[str, Any] | None = None, method: str | None = None, timeout_s: float = 120.0) -> Any:
    """The JSON that a URL answers with. Raises urllib.error.HTTPError, or another OSError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


def is_healthy(system_url: str) -> bool:
    """Whether a worker takes requests."""
    try:
        return bool(call(f"{system_url}/health")["status"] == "ready")
    except (OSError, ValueError, HTTPException):
        return False


def tail(log: Path, num_chars: int = 2000) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-num_chars:]


def free_port() -> int:
    """A port that no process listens at, and that no other connection takes by chance.

    Dynamo reads the port of its system server as a number of 16 bits with a sign.
    """
    for _ in range(_PORT_TRIALS):
        port = random.randrange(*_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((_LOOPBACK, port))
            return port
    raise FleetFailed(f"none of {_PORT_TRIALS} ports from {_PORTS[0]} to {_PORTS[1] - 1} is free")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill it if it does not."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
