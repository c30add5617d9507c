"""`ServerProcess`: one tritonserver over our model repository, from its checks to the removal of its last trace."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import IO, Self

from multilora_engine.errors import MultiloraError
from multilora_engine.process.liveness import drain_engine, wait_for_end
from multilora_engine.process.paths import ENGINE_MODULE, RELAY_MODULE, socket_path, temporary_folder
from multilora_engine.shared_python import check_paths_are_ascii
from multilora_engine.tritonserver.arguments import (
    Addresses,
    ServerOptions,
    hardening_arguments,
    resolve_addresses,
    server_arguments,
    tracing_arguments,
)
from multilora_engine.tritonserver.checkpoint import check_checkpoint, check_stub_opens
from multilora_engine.tritonserver.installation import (
    check_free_space,
    check_programs,
    find_installation,
    has_gpu,
    make_backend_directory,
    server_environment,
)
from multilora_engine.tritonserver.log import ServerLog
from multilora_engine.tritonserver.probe import (
    Busy,
    NotReady,
    OverGrpc,
    OverHttp,
    ProbeFailed,
    Transport,
    probe_generation,
)
from multilora_engine.tritonserver.repository import check_configs, find_model_repository, model_names, write_overridden
from multilora_engine.tritonserver.request_guard import guarded
from multilora_engine.tritonserver.shared_memory import claim_regions, remove_leftovers
from multilora_engine.tritonserver.upstream_models import add_upstream_models
from multilora_wire.end_with_parent import end_with_parent
from multilora_wire.headers import CANARY_KEY_VARIABLE

TOKEN_VARIABLE = "MULTILORA_SERVER"
"""The environment variable that holds the server's token."""


def kill_marked_processes(token: str, spared: Collection[int] = ()) -> None:
    """SIGKILL every process of the server of `token` but those `spared`."""
    for pid in set(marked_processes(token)).difference(spared):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked_processes(token: str, proc: Path = Path("/proc")) -> Iterator[int]:
    """Every process whose environment says it belongs to the server of `token`.

    proc: a directory like proc(5), with a directory for each process.
    """
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    # Not `glob`, which lets an error through that a process causes when it ends at the wrong moment (ESRCH).
    for name in filter(str.isdecimal, os.listdir(proc)):
        with contextlib.suppress(OSError):
            if mark in (proc / name / "environ").read_bytes().split(b"\0"):
                yield int(name)


def dead_children(parent: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """Every child of a process that has ended, and that the parent has not noticed yet.

    proc: a directory like proc(5), with a directory for each process.
    """
    for name in filter(str.isdecimal, os.listdir(proc)):
        with contextlib.suppress(OSError):
            # The name, between brackets, may have any characters.
            state, parent_pid, *_ = (proc / name / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if state == "Z" and int(parent_pid) == parent:
                yield int(name)


def runs_module(pid: int, module: str) -> bool:
    """Whether a process is Python with this module as its program."""
    with contextlib.suppress(OSError):
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


logger = logging.getLogger(__name__)

_POLL_S = 0.2
_GRACE_S = 10.0
_IDLE_EXIT_S = 10.0
"""How long a server gets to end that has nothing in flight; it takes some 3 s."""

_ENGINE_EXIT_S = 10.0
"""The seconds that an engine whose server was killed has to write adapters to disk that are in memory only."""

_UNNOTICED_DEATH_S = 5.0
"""tritonserver (24.10) notices in a second that a model's process died, but never when that dies before they met."""

_LAST_STEP_S = 0.5
"""The seconds that the last answers have to pass through further steps of an ensemble: none begins after SIGTERM."""


class ServerFailed(MultiloraError):
    """The server ended, or was not ready in time. The message is the one line that says why."""


class ServerProcess:
    """A running tritonserver.

        with ServerProcess(ServerOptions(model=checkpoint, http_port=0, grpc_port=0, metrics_port=0)) as server:
            server.wait_ready()
            client = tritonclient.http.InferenceServerClient(server.http_url)

    `on_log` gets every line of the server's log that is not noise, in a thread of its own. `probe` is the inference
    that decides readiness, given `canary_url`. Leaving the block stops the server, by force if need be.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        on_log: Callable[[str], None] = logger.info,
        probe: Callable[[str], None] | None = None,
    ) -> None:
        self.options = options
        self.log = ServerLog()
        self._on_log = on_log
        self._canary_key = secrets.token_hex(16)
        self._transport: Callable[[str], Transport] = OverHttp if options.has_http else OverGrpc
        self._probe = probe or self._probe_generation
        self._resources = ExitStack()
        self._dead_since: dict[int, float] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        return self.addresses.http_url

    @property
    def grpc_url(self) -> str:
        return self.addresses.grpc_url

    @property
    def canary_url(self) -> str:
        """`host:port` at which the server is asked whether it answers."""
        return self.http_url if self.options.has_http else self.grpc_url

    @property
    def metrics_url(self) -> str:
        return self.addresses.metrics_url

    @property
    def successor_options(self) -> ServerOptions:
        """The options of a server in this one's place: clients find it at the same ports, even at any free ones."""
        ports = self.addresses
        return replace(
            self.options, http_port=ports.http_port, grpc_port=ports.grpc_port, metrics_port=ports.metrics_port
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def token(self) -> str:
        """The name that marks this server's processes and its files in /dev/shm."""
        return self._regions.token

    def start(self) -> None:
        """Make all possible checks, and start the server. Raises ConfigError."""
        if self.options.model:
            check_checkpoint(self.options.model)
            check_stub_opens(str(self.options.model.absolute()))
        check_programs(server_environment({}))
        check_paths_are_ascii()
        check_free_space()
        remove_leftovers()
        with ExitStack() as resources:
            self._folder = Path(
                resources.enter_context(tempfile.TemporaryDirectory(prefix="multilora-", dir=temporary_folder()))
            )
            self._regions = resources.enter_context(claim_regions())
            resources.callback(kill_marked_processes, self._regions.token)
            self._repository = self._prepare_repository()
            self.addresses = self._resolve_addresses()
            self._process = self._spawn(self._command())
            self._resources = resources.pop_all()
        assert self._process.stdout is not None
        self._reader = Thread(target=self._read_log, args=(self._process.stdout,), name="server-log", daemon=True)
        self._reader.start()

    def wait_ready(self, on_progress: Callable[[str], None] = logger.debug) -> None:
        """Return when a real inference has succeeded. Raises ServerFailed when the server ends or the time is up."""
        deadline = time.monotonic() + self.options.startup_timeout_s
        for condition in (self._is_listening, self._answers):
            while not condition():
                self._wait_for_progress(deadline)
                on_progress(self.progress)

    @property
    def progress(self) -> str:
        """How far the start has come, for a person."""
        total = len(model_names(self._repository))
        loaded = self.log.loaded
        if len(loaded) >= total:
            return "all models loaded, trying an inference"
        if self.log.is_compiling:
            return "compiling the CPU kernels, once on this machine, some 90 s on two cores"
        return f"loaded {len(loaded)} of {total} models" + (f": {', '.join(loaded)}" if loaded else "")

    def ask(self) -> None:
        """Try an inference. Raises NotReady or Busy, and ServerFailed for a server that will not mend itself."""
        try:
            self._probe(self.canary_url)
        except ProbeFailed as error:
            raise ServerFailed(f"the server no longer answers: {error}") from None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the server ends; returns its exit status. Raises subprocess.TimeoutExpired."""
        if self._process.returncode is None and not wait_for_end(self.pid, timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.args, timeout)
        return self._process.wait()

    def failure(self, status: int) -> ServerFailed:
        """Why the server, which has ended with `status`, did so."""
        self._clean_up()
        if status < 0:
            name = signal.strsignal(-status)
            return ServerFailed(f"tritonserver was ended by signal {-status} ({name}), after: {self.log.failure}")
        return ServerFailed(f"{self.log.failure} (tritonserver ended with status {status})")

    def stop(self) -> int:
        """Let requests in flight end, then SIGTERM, then SIGKILL; returns the exit status. May be called again.

        New requests are refused from the first. All of it takes no longer than the exit timeout and a grace.

        tritonserver (24.10) waits for every gRPC stream that a client has left open, though nothing is in flight in it,
        until its exit timeout is over. Once the engine has ended all requests, that is waited for no longer.
        """
        deadline = time.monotonic() + self.options.exit_timeout_s + _GRACE_S
        is_idle = False
        try:
            is_idle = self._drain()
            self._process.terminate()
            left_s = max(0.0, deadline - time.monotonic())
            return self.wait(min(left_s, _IDLE_EXIT_S) if is_idle else left_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self.wait()
            if not is_idle:
                return status
            logger.info("tritonserver waited for streams without a request in flight, and was ended")
            self._let_engine_end()
            return 0
        finally:
            self._clean_up()

    def kill(self) -> None:
        """End the server at once, for one that is broken: requests still in flight could keep `stop` waiting."""
        self._process.kill()
        self.wait()
        self._clean_up()

    def _drain(self) -> bool:
        """Whether the engine has ended all requests in flight."""
        is_drained = False
        for pid in marked_processes(self.token):
            if _is_engine(pid):
                is_drained = drain_engine(pid, socket_path(self.pid), self.options.exit_timeout_s)
                time.sleep(_LAST_STEP_S)
        return is_drained

    def _let_engine_end(self) -> None:
        """Wait for the engine of a killed server: it ends by itself once the process that started it is gone."""
        engines = [pid for pid in marked_processes(self.token) if _is_engine(pid)]
        kill_marked_processes(self.token, spared=engines)
        for pid in engines:
            wait_for_end(pid, _ENGINE_EXIT_S)

    def _prepare_repository(self) -> Path:
        # In the server's own folder, always: nothing is known of the characters in the path of the given one.
        repository = find_model_repository(self.options.model_repository)
        linked = write_overridden(repository, self.options.overrides, self._folder / "model_repository")
        add_upstream_models(linked, self.options.upstream_models)
        check_configs(linked, has_gpu, {**os.environ, **self._model_variable()})
        return linked

    def _resolve_addresses(self) -> Addresses:
        options = self.options
        return resolve_addresses(
            options.host, options.http_port, options.grpc_port, options.metrics_port, options.http_host
        )

    def _command(self) -> list[str]:
        installation = find_installation(self.options.tritonserver)
        command = [str(installation.executable), *server_arguments(self.options, self.addresses, self._regions)]
        command += hardening_arguments(self.options, installation.executable)
        command += tracing_arguments(self.options.trace_config, installation.executable)
        command.append(f"--model-repository={self._repository}")
        if installation.python_backend:
            backends = make_backend_directory(installation, self._folder / "backends")
            command.append(f"--backend-directory={backends}")
        return command

    def _spawn(self, command: list[str]) -> subprocess.Popen[str]:
        variables = {TOKEN_VARIABLE: self._regions.token, CANARY_KEY_VARIABLE: self._canary_key}
        variables |= self._model_variable()
        return subprocess.Popen(
            # Its models' processes look after it by themselves, and the engine after the one that started it.
            end_with_parent(command),
            env=guarded(server_environment(variables), self._folder),
            # The stubs have the current directory on sys.path, so it must not hold anything importable.
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A Ctrl-C is for this process, which then stops the server in order.
            start_new_session=True,
            pass_fds=(self._regions.lock_fd,),
        )

    def _model_variable(self) -> dict[str, str]:
        return {"MULTILORA_MODEL": str(self.options.model.absolute())} if self.options.model else {}

    def _read_log(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                text = line.rstrip("\n")
                if self.log.feed(text) or self.options.log_verbose:
                    self._on_log(text)

    def _is_listening(self) -> bool:
        return self._transport(self.canary_url).is_ready()

    def _probe_generation(self, url: str) -> None:
        probe_generation(self._transport(url), api_key=self._canary_key)

    def _answers(self) -> bool:
        with contextlib.suppress(NotReady, Busy):
            self.ask()
            return True
        return False

    def _wait_for_progress(self, deadline: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise self.failure(self.wait(_POLL_S))
        dead = set(dead_children(self.pid))
        self._dead_since = {pid: self._dead_since.get(pid, time.monotonic()) for pid in dead}
        if any(time.monotonic() - since > _UNNOTICED_DEATH_S for since in self._dead_since.values()):
            raise ServerFailed(f"the process of a model died before its load began.{self.log.last_words}")
        if time.monotonic() > deadline:
            raise ServerFailed(f"not ready after {self.options.startup_timeout_s:g} s: {self.progress}")

    def _clean_up(self) -> None:
        """Kill processes that outlived the server, remove its files, and read its log to the end."""
        self._resources.close()
        self._reader.join(_GRACE_S)


def _is_engine(pid: int) -> bool:
    """Whether a process is the engine, or stands in its place."""
    return runs_module(pid, ENGINE_MODULE) or runs_module(pid, RELAY_MODULE)
