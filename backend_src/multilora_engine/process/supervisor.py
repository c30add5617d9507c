"""`EngineProcess`: starts the engine process, starts it again when it dies, and ends it."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from multilora_engine.errors import ConfigError
from multilora_engine.process.messages import Launch, StartFailed, StartReport

_MAX_BACKOFF_S = 30.0
_HEALTHY_S = 60.0
"""An engine that lived this long did not die of its start; the next one starts at once again."""

_EXIT_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


def engine_command() -> tuple[str, ...]:
    """Runs the engine with this environment's Python; inside a Triton stub `sys.executable` is not one."""
    return (str(Path(sys.prefix) / "bin" / "python3"), "-m", "multilora_engine.process.server")


class EngineProcess:
    """One engine process at a time, kept alive by a thread. The engine ends by itself when this process does.

    generation: how many engine processes there have been.
    """

    def __init__(
        self,
        parameters: Mapping[str, str],
        socket_path: Path,
        environ: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        """environ, command: of the engine process; the defaults are our own environment and `engine_command`."""
        self.generation = 0
        self._launch = msgspec.json.encode(Launch(dict(parameters), str(socket_path))) + b"\n"
        self._environ = environ
        self._command = list(command or engine_command())
        self._is_closing = threading.Event()
        self._spawning = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True)

    def start(self) -> None:
        """Start the engine and wait until fronts can connect. Raises ConfigError with the engine's own words."""
        _await_start(self._spawn(), self._launch)
        self._thread.start()

    def close(self) -> None:
        """End the engine process, if there is one, and stop watching."""
        with self._spawning:
            self._is_closing.set()
        if self._process is None:
            return
        _end(self._process)
        if self._thread.is_alive():
            self._thread.join()
        _close_pipes(self._process)

    def _supervise(self) -> None:
        num_deaths = 0
        while not self._is_closing.is_set():
            num_deaths = 1 if self._outlive() > _HEALTHY_S else num_deaths + 1
            if not self._is_closing.wait(_backoff_s(num_deaths)):
                self._restart()

    def _outlive(self) -> float:
        """Wait for the end of the engine process; the seconds that took."""
        assert self._process is not None
        started = time.monotonic()
        status = self._process.wait()
        if not self._is_closing.is_set():
            logger.error("engine %d ended with status %d", self.generation, status)
        return time.monotonic() - started

    def _restart(self) -> None:
        try:
            _await_start(self._spawn(), self._launch)
            logger.info("engine %d is ready", self.generation)
        except ConfigError as error:
            logger.error("engine %d cannot start: %s", self.generation, error)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._spawning:
            if self._is_closing.is_set():
                raise ConfigError("the server is shutting down")
            if self._process is not None:
                _close_pipes(self._process)
            self.generation += 1
            # A session of its own: Ctrl-C at the server's terminal must not reach the engine before the server is done.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environ, start_new_session=True
            )
            return self._process


def _await_start(process: subprocess.Popen[bytes], launch: bytes) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(launch)
        process.stdin.flush()
    except BrokenPipeError:
        logger.debug("the engine process ended before it read its parameters")
    line = process.stdout.readline()
    if not line:
        raise ConfigError(f"the engine process ended with status {process.wait()} before it was ready; see its log")
    report: StartReport = msgspec.json.decode(line, type=StartReport)
    if isinstance(report, StartFailed):
        process.wait()
        raise ConfigError(report.reason)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The end of its stdin tells an engine to end; one that does not listen, because it still loads, is killed."""
    _close(process.stdin)
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    _close(process.stdin)
    _close(process.stdout)


def _close(pipe: IO[bytes] | None) -> None:
    assert pipe is not None, "the engine is started with pipes"
    with contextlib.suppress(BrokenPipeError):
        pipe.close()


def _backoff_s(num_deaths: int) -> float:
    """0, 1, 2, 4, ... seconds: the first death in a row is no reason to wait."""
    return 0.0 if num_deaths <= 1 else min(_MAX_BACKOFF_S, 2.0 ** (num_deaths - 2))
