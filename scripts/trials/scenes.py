"""Servers as attacks meet them: behind the proxy with OpenAI's front beside it, with API keys, or open to everybody."""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from multilora_engine.process.paths import ENGINE_MODULE
from multilora_engine.tritonserver import ServerProcess
from multilora_engine.tritonserver.server_process import marked_processes
from servers.local_proxy import LocalProxy
from servers.openai_front import started_openai_front
from servers.started_server import started_server
from trials.door_attacks import DOOR_ATTACKS, ask_and_hang_up, ask_for_classes, stop_the_victims_request_in_its_name
from trials.doors import Attack, Doors
from trials.engine_attacks import ENGINE_ATTACKS, SHARED_ATTACKS, stop_the_victims_request
from trials.openai_attacks import OPENAI_ATTACKS
from trials.timing_attacks import TENANTS, TIMING_ATTACKS

T = TypeVar("T")

PARAMETERS = {"max_num_seqs": "16", "max_num_batched_tokens": "64"}
"""The largest step that an operator would allow on two cores: all other clients wait for it."""


@dataclass(frozen=True)
class Stage:
    """A server that is ready, and the doors of the attacker and of its victim."""

    server: ServerProcess
    attackers: Doors
    victims: Doors

    @property
    def is_alive(self) -> bool:
        try:
            self.server.wait(0)
        except subprocess.TimeoutExpired:
            return True
        return False

    @property
    def num_bytes(self) -> int:
        """Resident memory of all processes of the server: not of the proxy, not of OpenAI's front."""
        return sum(self._told(lambda process: process.memory_info().rss))

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id; None while there is no engine."""
        commands = self._told(lambda process: (process.pid, process.cmdline()))
        return next((pid for pid, command in commands if ENGINE_MODULE in command), None)

    def _told(self, read: Callable[[psutil.Process], T]) -> list[T]:
        """The results of `read` for each process of the server that still runs."""
        told = []
        for pid in {self.server.pid, *marked_processes(self.server.token)}:
            with suppress(psutil.NoSuchProcess):
                told.append(read(psutil.Process(pid)))
        return told


@dataclass(frozen=True)
class Scene:
    """title: how the attacker reaches the server. open: starts one."""

    title: str
    attacks: Mapping[str, Attack]
    open: Callable[[Path], AbstractContextManager[Stage]]


@contextmanager
def behind_proxy(model: Path) -> Iterator[Stage]:
    """The attacker comes from 127.0.0.1, and its victim from ::1, which is another client to the proxy."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        secret = secrets.token_hex(32)
        (folder / "secret").write_text(secret)
        server = stack.enter_context(
            started_server(model, overrides={**PARAMETERS, "client_header_secret_file": str(folder / "secret")})
        )
        ports = server.addresses
        proxy = stack.enter_context(LocalProxy(ports.http_port, ports.grpc_port, ports.metrics_port, secret=secret))
        openai_url = stack.enter_context(
            started_openai_front(server.grpc_url, "--client-header-secret-file", str(folder / "secret"))
        )
        victims = Doors(*(url.replace("127.0.0.1", "[::1]") for url in (proxy.http_url, proxy.grpc_url)))
        yield Stage(server, Doors(proxy.http_url, proxy.grpc_url, openai_url), victims)


@contextmanager
def with_keys(model: Path) -> Iterator[Stage]:
    """Attacker and victim are tenants of their own. The server's door is open, as keys need no proxy."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        entries = [{"key": key, "tenant": name, "base_model": True, "upload": True} for name, key in TENANTS.items()]
        keys.write_text(json.dumps({"keys": entries}))
        with started_server(model, overrides={**PARAMETERS, "api_keys_file": str(keys)}) as server:
            victim, attacker = (Doors(server.http_url, server.grpc_url, key=TENANTS[name]) for name in TENANTS)
            yield Stage(server, attacker, victim)


@contextmanager
def straight(model: Path) -> Iterator[Stage]:
    """There are neither proxy nor keys: the server cannot tell the two apart."""
    with started_server(model, overrides=PARAMETERS) as server:
        doors = Doors(server.http_url, server.grpc_url)
        yield Stage(server, doors, doors)


STOPS: Mapping[str, Attack] = {
    "stop by the victim's id": stop_the_victims_request,
    "stop by the victim's id in its name": stop_the_victims_request_in_its_name,
}

HELD_BY_KEYS: Mapping[str, Attack] = {
    "texts as classes": ask_for_classes,
    "64 answers of 400 tokens, hung up": ask_and_hang_up,
}

SCENES = (
    Scene("proxy", {**ENGINE_ATTACKS, **SHARED_ATTACKS, **DOOR_ATTACKS, **OPENAI_ATTACKS}, behind_proxy),
    Scene("API keys", {**STOPS, **SHARED_ATTACKS, **HELD_BY_KEYS, **TIMING_ATTACKS}, with_keys),
    Scene("none", DOOR_ATTACKS, straight),
)
"""All attacks, by the guard that stands before the server."""
