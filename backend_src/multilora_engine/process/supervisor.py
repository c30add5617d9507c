"""`EngineProcess`: starts the engine process, starts it again when it dies or hangs, and ends it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from multilora_engine.errors import ConfigError
from multilora_engine.process.liveness import LOOKS_PER_TIMEOUT, Heartbeat, Pulse, heartbeat_file, wait_for_end
from multilora_engine.process.messages import Launch, StartFailed, StartReport
from multilora_engine.process.paths import ENGINE_MODULE
from multilora_engine.shared_python import python_executable

_LONGEST_S = 30.0
_HEALTHY_S = 60.0
_EXIT_TIMEOUT_S = 5.0
_RETRY_S = 1.0

logger = logging.getLogger(__name__)


def keep_alive(live: Callable[[], float], pause: Callable[[float], bool], max_restarts: float = math.inf) -> None:
    """Let a process live again and again: the engine, by `EngineProcess`, and the server, by `multilora-serve`.

    live: one life, to its end; returns the seconds for which the process was well. pause: waits for so many seconds
    before the next life; true ends it all. The pauses are 0, 1, 2, 4, ... 30 seconds, because the first death in a row
    is no reason to wait. A process that was well for a minute did not die of its start: its death begins a new row.
    Returns after `pause` was true, or after more than `max_restarts` deaths in a row.
    """
    num_deaths = 0
    while True:
        num_deaths = 1 if live() > _HEALTHY_S else num_deaths + 1
        if num_deaths > max_restarts or pause(min(_LONGEST_S, 2.0 ** (num_deaths - 2)) if num_deaths > 1 else 0.0):
            return


def engine_command(module: str = ENGINE_MODULE) -> tuple[str, ...]:
    """The command that runs the engine, or the program in its place, with this environment's Python."""
    return (python_executable(), "-m", module)


class EngineProcess:
    """One engine process at a time, kept alive by a thread. The engine ends by itself when this process does.

    generation: the number of engine processes so far.
    """

    def __init__(
        self,
        parameters: Mapping[str, str],
        socket_path: Path,
        environ: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
        hang_timeout_s: float = 0.0,
    ) -> None:
        """environ, command: for the engine process; the defaults are this process's environment and `engine_command`.

        hang_timeout_s: an engine without a sign of life for this time is killed; 0 lets it hang.
        """
        self.generation = 0
        self._parameters = dict(parameters)
        self._socket_path = socket_path
        self._look_interval_s = hang_timeout_s / LOOKS_PER_TIMEOUT if hang_timeout_s else None
        self._environ = environ
        self._command = list(command or engine_command())
        self._is_closing = threading.Event()
        self._spawning = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._heartbeat: Heartbeat | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True)

    def start(self) -> None:
        """Start the engine and wait until fronts can connect. Raises ConfigError with the engine's own words."""
        _await_start(*self._spawn())
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
        keep_alive(self._live, self._is_closing.wait)

    def _live(self) -> float:
        """Run one life of an engine. Returns the seconds that it took."""
        while not self._is_closing.is_set():
            try:
                if self._has_ended:
                    self._has_ended = False
                    self._restart()
                return self._outlive()
            except Exception:
                # This thread goes on after any error, because nothing else would start the engine again.
                logger.exception("engine %d cannot be watched", self.generation)
                self._is_closing.wait(_RETRY_S)
        return 0.0

    def _outlive(self) -> float:
        """Wait until the engine process ends, and kill it if it hangs. Returns the seconds that it lived."""
        assert self._process is not None
        assert self._heartbeat is not None
        started = time.monotonic()
        if not _ends_or_hangs(self._process, self._heartbeat):
            logger.error("engine %d gives no sign of life: it is killed", self.generation)
            self._process.kill()
        status = self._process.wait()
        if not self._is_closing.is_set():
            logger.error("engine %d ended with status %d", self.generation, status)
        self._has_ended = True
        return time.monotonic() - started

    def _restart(self) -> None:
        try:
            _await_start(*self._spawn())
            logger.info("engine %d is ready", self.generation)
        except ConfigError as error:
            logger.error("engine %d cannot start: %s", self.generation, error)
        except Exception:
            logger.exception("engine %d cannot start", self.generation)
            # A process that got no `Launch`, or that reports something else, would never end by itself.
            if self._process is not None:
                self._process.kill()

    def _spawn(self) -> tuple[subprocess.Popen[bytes], bytes]:
        """Start an engine process. Returns it with the line that it waits for."""
        with self._spawning:
            if self._is_closing.is_set():
                raise ConfigError("the server is shutting down")
            if self._process is not None:
                _close_pipes(self._process)
            self.generation += 1
            fd = heartbeat_file()
            try:
                # A session of its own: Ctrl-C at the server's terminal must not reach the engine before the server is
                # done.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=self._environ,
                    start_new_session=True,
                    pass_fds=(fd,),
                )
                self._heartbeat = Heartbeat(fd, self._look_interval_s)
            finally:
                os.close(fd)
            launch = Launch(self._parameters, str(self._socket_path), fd, self._look_interval_s)
            return self._process, msgspec.json.encode(launch) + b"\n"


def _ends_or_hangs(process: subprocess.Popen[bytes], heartbeat: Heartbeat) -> bool:
    """Wait until the process ends or hangs. Returns whether it has ended."""
    pulse = Pulse()
    while process.poll() is None and not wait_for_end(process.pid, heartbeat.interval_s):
        if pulse.has_stopped(heartbeat.count):
            return False
    return True


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
        _end(process)
        raise ConfigError(report.reason)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End an engine by closing its stdin. An engine that still loads does not notice, and is killed."""
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
