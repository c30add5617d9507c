"""`multilora-serve` as users run it, over the telling model, in a mount namespace of its own.

There /dev/shm and the disk tier are small tmpfs, so that filling them up hurts nobody else; the namespace outlives the
server, as a volume does. Works for root, and elsewhere with user namespaces.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

_READY = re.compile(r"ready  HTTP (\S+)  gRPC (\S+)  metrics (\S+)")
_RESTARTING = re.compile(r"restarting in \S+ s: (.*)")
_NUM_LINES_KEPT = 30
START_TIMEOUT_S = 180.0


@contextmanager
def namespace(cache: Path, cache_bytes: int, shm_bytes: int) -> Iterator[list[str]]:
    """A command prefix that runs a program where `cache` and /dev/shm are tmpfs of these sizes."""
    mounts = (
        f"mount -t tmpfs -o size={shm_bytes} tmpfs /dev/shm",
        f"mount -t tmpfs -o size={cache_bytes} tmpfs {cache}",
        "echo mounted",
        "exec cat",
    )
    is_root = os.geteuid() == 0
    user = [] if is_root else ["--user", "--map-root-user"]
    keeper = subprocess.Popen(
        ["unshare", *user, "--mount", "sh", "-ec", "; ".join(mounts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    try:
        if keeper.stdout.readline() != "mounted\n":
            raise PermissionError("no mount namespace: run as root, or allow user namespaces")
        yield [
            "nsenter",
            f"--target={keeper.pid}",
            "--mount",
            *([] if is_root else ["--user", "--preserve-credentials"]),
        ]
    finally:
        keeper.communicate()


def _role(command: list[str]) -> str | None:
    program = Path(command[0]).name if command else ""
    if program == "tritonserver":
        return program
    if "multilora_engine.process.main" in command:
        return "engine"
    return Path(command[1]).parents[1].name if program == "triton_python_backend_stub" else None


class SandboxedServer:
    """One `multilora-serve` at a time."""

    def __init__(
        self,
        prefix: list[str],
        model: Path,
        cache: Path,
        parameters: Mapping[str, str],
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """prefix: of `namespace`. log: gets every line that the server writes. environment: further variables."""
        self._prefix = prefix
        self._model = model
        self._cache = cache
        self._parameters = parameters
        self._log = log
        self._environment = {**os.environ, **(environment or {})}
        self._lines: deque[str] = deque(maxlen=_NUM_LINES_KEPT)
        self._num_ready = 0
        self.restarts: list[str] = []
        """The reasons for which `multilora-serve` started tritonserver again, in its own words."""
        self._changed = threading.Condition()
        self._ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
        self.http_url = self.grpc_url = ""

    @property
    def cache(self) -> Path:
        """The disk tier's directory, seen from outside."""
        return Path(f"/proc/{self._process.pid}/root{self._cache}")

    @property
    def shared_memory(self) -> Path:
        """The server's /dev/shm, seen from outside."""
        return Path(f"/proc/{self._process.pid}/root/dev/shm")

    def start(self, *arguments: str) -> None:
        """Start the server, and wait until it is ready. Later servers get the ports of the first."""
        settings = [f"--set={name}={value}" for name, value in self._parameters.items()]
        serve = [sys.executable, "-m", "multilora_engine.tritonserver.launch", f"--model={self._model}"]
        self._process = subprocess.Popen(
            [*self._prefix, *serve, *self._ports, *settings, *arguments],
            env=self._environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        num_ready = self._num_ready
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        self.wait_ready(num_ready + 1)

    @property
    def num_ready(self) -> int:
        """The number of times that it has said that it is ready."""
        return self._num_ready

    def wait_ready(self, num_ready: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with self._changed:
            while self._num_ready < num_ready:
                assert self._reader.is_alive(), "multilora-serve ended:\n" + self._end_of_log
                assert time.monotonic() < deadline, "multilora-serve is not ready:\n" + self._end_of_log
                self._changed.wait(1.0)

    def processes(self) -> dict[str, psutil.Process]:
        """The processes by role: `serve`, `tritonserver`, `engine`, and each model's process by the model's name."""
        found = {"serve": psutil.Process(self._process.pid)}
        for process in found["serve"].children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if role := _role(process.cmdline()):
                    found[role] = process
        return found

    @property
    def _end_of_log(self) -> str:
        return "".join(self._lines)

    def terminate(self) -> int:
        """Send SIGTERM; the exit status."""
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        status = self._process.wait(START_TIMEOUT_S)
        self._reader.join()
        return status

    def close(self) -> None:
        if self._process.poll() is None:
            self.terminate()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.append(line)
                if self._log is not None:
                    with self._log.open("a") as file:
                        file.write(line)
                if match := _RESTARTING.search(line):
                    self.restarts.append(match[1])
                if match := _READY.search(line):
                    self.http_url, self.grpc_url = match[1], match[2]
                    ports = [match[i].split("/metrics")[0].rsplit(":", 1)[1] for i in (1, 2, 3)]
                    names = ("http", "grpc", "metrics")
                    self._ports = [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
                    with self._changed:
                        self._num_ready += 1
                        self._changed.notify_all()
