"""Breaks a real server under load in every way that operators fear, and prints one table: the errors that clients saw,
the time to recovery, and the losses.

Each fault hits a `multilora-serve` with a disk tier while clients ask, upload and cancel (judging_clients.py). Right
is: every client is answered again, every adapter whose upload was acknowledged still answers, no answer is of another
adapter, no request is left without an end, and clients saw no other errors than the fault explains. Faults come from
outside, by signals, limits, full file systems and a clock of their own: nothing in the product knows of them.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle, groupby
from pathlib import Path
from typing import Annotated
from urllib.request import urlopen

import psutil
import typer
from rich.console import Console
from rich.progress import track

from checkpoints.telling_adapters import MAX_RANK, PROMPT_TOKENS, save_checkpoint
from marked_tables import console_table, markdown_table, write_table
from multilora_client import Client, MultiloraClientError
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.tritonserver.launch import sigterm_as_ctrl_c
from multilora_wire.layout import AdapterLayout
from repository import REPOSITORY
from servers.sandboxed_server import SandboxedServer, namespace
from sources import measured_source
from trials.judging_clients import ANSWER_TIMEOUT_S, JudgingClients, Tally
from trials.wall_clock import WallClock

NUM_ADAPTERS = 150
"""Adapters of 256 KiB each: five times the size of these servers' host tier, and two thirds of their disk."""
COLUMNS = ("fault", "clients saw", "recovery, s", "adapters", "lost", "wrong")
_NUMBERS = range(2, len(COLUMNS))

NO_ERRORS: frozenset[str] = frozenset()
UNAVAILABLE = frozenset({"UNAVAILABLE"})
BROKEN_SERVER = frozenset({"UNAVAILABLE", "INTERNAL", "UNKNOWN"})
"""The errors of a server whose own process was killed: a closed connection, or Triton's error for a dead model."""

CLOCK_SET_AHEAD = BROKEN_SERVER
"""Mostly there are no errors. But the Python backend (24.10) waits for a model's process until a moment of the wall
clock, and takes the process for dead when the clock is set past that moment; a later answer of the process can crash
tritonserver. Under eight clients it lived through some 40 settings of the clock an hour ahead."""

_RECOVERY_TIMEOUT_S = 150.0
_WARM_UP_S = 2.0
_DAMAGED_BYTES = 4096
_HOUR_S = 3600
_CLOCK_TOLERANCE_S = 60.0
_CLOCK_SWING_S = 0.5
_SHM_BYTES = 192 << 20
_CACHE_BYTES = 64 << 20
_PARAMETERS = {
    "device": "cpu",
    "num_threads": "1",
    "max_num_batched_tokens": "4096",
    "max_lora_rank": str(MAX_RANK),
    "lora_cache_host_memory_bytes": "8MiB",
    "kv_cache_memory_bytes": "64MiB",
    "engine_hang_timeout_s": "5",
}
_EXIT_TIMEOUT_S = 20
_EXIT_GRACE_S = 15
_ARGUMENTS = ("--canary-interval-secs=1", f"--exit-timeout-secs={_EXIT_TIMEOUT_S}", "--max-restarts=20")


@dataclass(frozen=True)
class Scene:
    """The server and the clients of a fault. clock: the server's own wall clock; None for the machine's."""

    server: SandboxedServer
    load: JudgingClients
    clock: WallClock | None = None


@dataclass(frozen=True)
class Fault:
    """inject: returns when the cause is over. errors: the codes that clients may see; without any, every process of the
    server must live through the fault, too. sets_clock: whether it needs a server with a wall clock of its own."""

    name: str
    inject: Callable[[Scene], None]
    errors: frozenset[str]
    sets_clock: bool = False


@dataclass(frozen=True)
class Outcome:
    """recovery_s: from the fault until every client was answered again, None if one was not in time. replaced: the
    roles whose processes are new.
    """

    fault: Fault
    seen: Tally
    recovery_s: float | None
    num_acknowledged: int
    replaced: frozenset[str] = frozenset()

    @property
    def complaints(self) -> list[str]:
        """Every broken promise, in words."""
        codes = {code for code in self.seen.seen if code.isupper()}
        return [
            *self.seen.wrong[:5],
            *([f"{len(self.seen.lost)} of {self.num_acknowledged} adapters are lost"] if self.seen.lost else []),
            *([f"{self.seen.stuck} requests were stuck"] if self.seen.stuck else []),
            *(f"clients saw {code}: {self.seen.messages[code]}" for code in sorted(codes - self.fault.errors)),
            *(["not every client was answered again"] if self.recovery_s is None else []),
            *(f"{role} was started again" for role in sorted(self.replaced) if not self.fault.errors),
        ]


def kill_engine(scene: Scene) -> None:
    scene.server.processes()["engine"].kill()


def hang_engine(scene: Scene) -> None:
    scene.server.processes()["engine"].suspend()


def kill_model_process(scene: Scene) -> None:
    num_ready = scene.server.num_ready
    scene.server.processes()["generation_unary"].kill()
    scene.server.wait_ready(num_ready + 1)


def kill_tritonserver(scene: Scene) -> None:
    num_ready = scene.server.num_ready
    scene.server.processes()["tritonserver"].kill()
    scene.server.wait_ready(num_ready + 1)


def run_out_of_memory(scene: Scene) -> None:
    """Allow the engine no byte more than it has; then send prompts that need a larger step than it has ever made."""
    engine = scene.server.processes()["engine"]
    # Not RLIMIT_AS, which counts the memory that malloc has reserved for its arenas and not made writable yet.
    engine.rlimit(resource.RLIMIT_DATA, (engine.memory_info().data, resource.RLIM_INFINITY))

    def is_answered(token_id: int) -> bool:
        with Client(f"http://{scene.server.http_url}") as client, suppress(MultiloraClientError):
            client.generate(input_ids=[token_id] * 500, max_tokens=4, timeout_s=60.0)
            return True
        return False

    with ThreadPoolExecutor(16) as pool:
        answered = list(pool.map(is_answered, PROMPT_TOKENS[:16]))
    assert not all(answered), "there was memory enough"
    with suppress(psutil.NoSuchProcess):
        engine.rlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def fill_disk(scene: Scene) -> None:
    with _filled(scene.server.cache), Client(f"http://{scene.server.http_url}") as client:
        for number in range(NUM_ADAPTERS, NUM_ADAPTERS + 20):
            with suppress(MultiloraClientError):
                scene.load.upload(client, number)


def fill_shared_memory(scene: Scene) -> None:
    with _filled(scene.server.shared_memory):
        time.sleep(_WARM_UP_S)


def damage_adapter_files(scene: Scene) -> None:
    """Damage every second file. Asking for all adapters twice reads each of them, since they do not fit into memory."""
    files = sorted(scene.server.cache.glob("*.safetensors"))[::2]
    scene.load.expect_damage({int(path.stem) for path in files})
    for path in files:
        with path.open("r+b") as file:
            file.seek(-_DAMAGED_BYTES, os.SEEK_END)
            file.write(os.urandom(_DAMAGED_BYTES))
    for _ in range(2):
        scene.load.ask_all()


def read_no_stream(scene: Scene) -> None:
    """Let clients ask for long answers and never read them."""
    body = '{"text_input": "<100>", "max_tokens": 400, "end_id": -1, "streaming": true}'
    with _connections(scene, 16) as sockets:
        for each in sockets:
            each.sendall(_post("generation/generate_stream", body))
        time.sleep(_WARM_UP_S)


def drop_connections(scene: Scene) -> None:
    """Hold 1,000 connections: a third sends nothing, a third half a request, a third reads no answer to its request."""
    body = '{"text_input": "<100>", "max_tokens": 400, "end_id": -1}'
    request = _post("generation_unary/generate", body)
    for _ in range(10):
        with _connections(scene, 100) as sockets:
            for index, each in enumerate(sockets):
                each.sendall((b"", request[: len(request) // 2], request)[index % 3])


def terminate(scene: Scene) -> None:
    """Act as a rolling update: SIGTERM, then another server over the same files. Any exit status will do."""
    _end(scene.server)
    scene.server.start(*_ARGUMENTS)


def _end(server: SandboxedServer) -> None:
    started = time.monotonic()
    server.terminate()
    assert time.monotonic() - started < _EXIT_TIMEOUT_S + _EXIT_GRACE_S, "it took longer than it was given"


def set_clock(scene: Scene, offset_s: int) -> None:
    """Set the clock of every process of the server, which then is ready and answers with its times."""
    assert scene.clock is not None
    others = [role for role, process in scene.server.processes().items() if not scene.clock.is_of(process.pid)]
    assert not others, f"not the clock of {others}"
    scene.clock.set(offset_s)
    scene.load.wait_until_all_are_right(_RECOVERY_TIMEOUT_S)
    assert _get(scene, "health/ready") == b""
    request = {"text_input": "<100>", "max_tokens": 1, "return_perf_metrics": True}
    told_s = json.loads(_get(scene, "models/generation_unary/generate", request))["arrival_time_ns"] / 1e9
    assert abs(told_s - time.time() - offset_s) < _CLOCK_TOLERANCE_S, "the engine has another time"


def set_clock_while_it_ends(scene: Scene) -> None:
    """Set the clock again and again from SIGTERM on; then start another server over the same files."""
    assert scene.clock is not None
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(_end, scene.server)
        for offset_s in cycle([_HOUR_S, -_HOUR_S]):
            scene.clock.set(offset_s)
            with suppress(TimeoutError):
                ended.result(_CLOCK_SWING_S)
                break
    scene.clock.set(0)
    scene.server.start(*_ARGUMENTS)


FAULTS = (
    Fault("engine: SIGKILL", kill_engine, UNAVAILABLE),
    Fault("engine hangs: SIGSTOP", hang_engine, UNAVAILABLE),
    Fault("out of memory in a step", run_out_of_memory, frozenset({"INTERNAL", "UNAVAILABLE"})),
    Fault("disk tier: disk full", fill_disk, UNAVAILABLE),
    Fault("disk tier: damaged files", damage_adapter_files, frozenset({"NOT_FOUND"})),
    Fault("streams that nobody reads", read_no_stream, NO_ERRORS),
    Fault("1,000 connections dropped", drop_connections, NO_ERRORS),
    Fault("a model's process: SIGKILL", kill_model_process, BROKEN_SERVER),
    Fault("/dev/shm full", fill_shared_memory, BROKEN_SERVER),
    Fault("SIGTERM, then a new server", terminate, BROKEN_SERVER | {"NOT_FOUND"}),
    Fault("tritonserver: SIGKILL", kill_tritonserver, BROKEN_SERVER),
    Fault("wall clock set an hour ahead", lambda scene: set_clock(scene, _HOUR_S), CLOCK_SET_AHEAD, sets_clock=True),
    Fault("wall clock set back two hours", lambda scene: set_clock(scene, -_HOUR_S), NO_ERRORS, sets_clock=True),
    Fault("wall clock set right again", lambda scene: set_clock(scene, 0), CLOCK_SET_AHEAD, sets_clock=True),
    Fault(
        "SIGTERM, and the wall clock swings", set_clock_while_it_ends, BROKEN_SERVER | {"NOT_FOUND"}, sets_clock=True
    ),
)


@contextmanager
def _filled(directory: Path) -> Iterator[None]:
    """The directory's file system has no free byte until the context ends."""
    filler = directory / "filler"
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"\0" * 4096):
                pass
        yield
    finally:
        with suppress(FileNotFoundError):
            filler.unlink()


@contextmanager
def _connections(scene: Scene, number: int) -> Iterator[list[socket.socket]]:
    host, port = scene.server.http_url.split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(number)]
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


def _get(scene: Scene, path: str, request: Mapping[str, object] | None = None) -> bytes:
    """The content of an answer. Raises OSError for any other status than 200."""
    body = None if request is None else json.dumps(request).encode()
    with urlopen(f"http://{scene.server.http_url}/v2/{path}", body, ANSWER_TIMEOUT_S) as answer:
        content: bytes = answer.read()
    return content


def _post(path: str, body: str) -> bytes:
    return f"POST /v2/models/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def inject(fault: Fault, scene: Scene) -> Outcome:
    """Let a fault happen under load, and wait until everything is as it was."""
    load = scene.load
    load.new_tally()
    with load.running():
        load.wait_until_all_are_right(_RECOVERY_TIMEOUT_S)
        time.sleep(_WARM_UP_S)
        before = scene.server.processes()
        started = time.monotonic()
        recovery_s: float | None = None
        with suppress(TimeoutError):
            fault.inject(scene)
            injected_s = time.monotonic() - started
            recovery_s = injected_s + load.wait_until_all_are_right(_RECOVERY_TIMEOUT_S)
    load.ask_all()
    after = scene.server.processes()
    replaced = frozenset(role for role, process in before.items() if after.get(role) != process)
    return Outcome(fault, load.new_tally(), recovery_s, load.num_acknowledged, replaced)


@contextmanager
def stage(num_clients: int, directory: Path, log: Path | None = None, has_own_clock: bool = False) -> Iterator[Scene]:
    """A server with a disk tier, and clients of it."""
    (cache := directory / "cache").mkdir()
    clock = WallClock(directory) if has_own_clock else None
    model = save_checkpoint(directory / "model")
    layout: AdapterLayout = checkpoint_layout(model, MAX_RANK, "float32")
    with sigterm_as_ctrl_c(), namespace(cache, _CACHE_BYTES, _SHM_BYTES) as prefix:
        parameters = _PARAMETERS | {"lora_cache_dir": str(cache)}
        server = SandboxedServer(prefix, model, cache, parameters, log, clock.environment if clock else None)
        try:
            server.start(*_ARGUMENTS)
            load = JudgingClients(server.http_url, server.grpc_url, layout, num_clients, NUM_ADAPTERS)
            yield Scene(server, load, clock)
        finally:
            server.close()


def cells(outcome: Outcome) -> list[str]:
    """The outcome in COLUMNS."""
    errors = {code: count for code, count in sorted(outcome.seen.seen.items()) if code.isupper()}
    saw = ", ".join([f"{outcome.seen.seen['right']} right", *(f"{n} {code}" for code, n in errors.items())])
    recovery = "never" if outcome.recovery_s is None else f"{outcome.recovery_s:.1f}"
    counts = (outcome.num_acknowledged, len(outcome.seen.lost), len(outcome.seen.wrong))
    return [outcome.fault.name, saw, recovery, *map(str, counts)]


def markdown(outcomes: Sequence[Outcome]) -> str:
    return markdown_table(COLUMNS, map(cells, outcomes), _NUMBERS)


def inject_all(faults: Sequence[Fault], num_clients: int, log: Path | None) -> Iterator[Outcome]:
    """Inject one fault after the other into one server; faults that set its clock into another."""
    for sets_clock, group in groupby(faults, lambda fault: fault.sets_clock):
        with (
            tempfile.TemporaryDirectory(prefix="multilora-faults-") as name,
            stage(num_clients, Path(name), log, has_own_clock=sets_clock) as scene,
        ):
            for fault in group:
                yield inject(fault, scene)


def main(
    fault: Annotated[list[str] | None, typer.Option(help="Only faults whose name has this in it; repeatable.")] = None,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 8,
    log: Annotated[Path | None, typer.Option(help="Append the server's log to this file.")] = None,
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of docs/operating.md.")] = False,
) -> None:
    """Inject every fault, one after the other. Ends with status 1 if a promise is broken."""
    source = measured_source() if update_docs else ""
    console, outcomes = Console(), list[Outcome]()
    chosen = [each for each in FAULTS if not fault or any(part in each.name for part in fault)]
    try:
        injected = inject_all(chosen, clients, log)
        for outcome in track(injected, "breaking things", len(chosen), console=console, transient=True):
            outcomes.append(outcome)
    finally:
        console.print(console_table(COLUMNS, map(cells, outcomes), "Faults under load", _NUMBERS))
    if update_docs:
        write_table(REPOSITORY / "docs" / "operating.md", "faults", markdown(outcomes), source)
    complaints = [f"{outcome.fault.name}: {text}" for outcome in outcomes for text in outcome.complaints]
    for complaint in complaints:
        console.print(complaint, style="red", markup=False)
    raise typer.Exit(1 if complaints else 0)
