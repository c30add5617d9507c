"""What a hostile client does to another one: a server of its own, a victim that streams again and again, and attacks.

The victim streams 64 greedy tokens over gRPC and notes the time between them: while nobody else asks, and during each
attack, which runs in a process of its own. An attack has hurt when the 99th percentile is more than three times the
quiet one, when a request of the victim ended with an error or too early, or when the engine is another one.
Everything stays on the loopback; attacks are bounded in number and time.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc  # type: ignore[import-untyped]
import numpy as np
import psutil
import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Column, Table
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from checkpoints.prepare_default_model import ensure_default_checkpoint
from multilora_engine.process.paths import ENGINE_MODULE
from multilora_engine.tritonserver import ServerProcess
from multilora_engine.tritonserver.marked_processes import marked_processes
from servers.started_server import started_server
from trials.door_attacks import DOOR_ATTACKS, Attack, Doors
from trials.engine_attacks import ENGINE_ATTACKS, VICTIM_REQUEST_ID, infer_request

ATTACKS: Mapping[str, Attack] = {**ENGINE_ATTACKS, **DOOR_ATTACKS}

MAX_GAP_RATIO = 3.0
"""How much longer the victim's longest gaps may become."""

_NUM_TOKENS = 64
_QUIET_S = 10.0
_MIN_ATTACK_S = 5.0
_ATTACK_TIMEOUT_S = 180.0
_MIB = 1 << 20
_TABLE_WIDTH = 200


@dataclass(frozen=True)
class Gaps:
    """What a victim met in some time: seconds between its tokens, and what went wrong."""

    seconds: list[float]
    errors: list[str]

    @property
    def p50_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def p99_ms(self) -> float:
        ordered = sorted(self.seconds)
        return 1e3 * ordered[int(0.99 * (len(ordered) - 1))] if ordered else float("nan")


@dataclass(frozen=True)
class Row:
    """One attack. num_bytes: of all processes of the server, before it and after. met: what the attacker was told."""

    name: str
    quiet: Gaps
    under: Gaps
    num_bytes: tuple[int, int]
    met: str
    is_same_engine: bool

    @property
    def verdict(self) -> str:
        if not self.is_same_engine:
            return "engine lost"
        if self.under.errors:
            return f"{len(self.under.errors)} errors, first: {self.under.errors[0]}"
        return "fine" if self.under.p99_ms <= MAX_GAP_RATIO * self.quiet.p99_ms else "slow"


class Victim:
    """Streams again and again, in a thread of its own, until the context ends."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._lock = threading.Lock()
        self._gaps = Gaps([], [])
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="victim")

    def __enter__(self) -> Victim:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def take(self) -> Gaps:
        """What it met since this was asked last."""
        with self._lock:
            gaps, self._gaps = self._gaps, Gaps([], [])
        return gaps

    def _run(self) -> None:
        with grpc.insecure_channel(self._doors.grpc_url) as channel:
            stub = GRPCInferenceServiceStub(channel)
            while not self._is_over.is_set():
                self._stream(stub)

    def _stream(self, stub: GRPCInferenceServiceStub) -> None:
        num_tokens, last_s = 0, None
        try:
            for answer in stub.ModelStreamInfer(iter([_victims_request()])):
                now_s = time.perf_counter()
                self._note(None if last_s is None else now_s - last_s, answer.error_message)
                last_s = now_s
                num_tokens = num_tokens if answer.error_message else num_tokens_of(answer.infer_response)
        except grpc.RpcError as error:
            self._note(None, str(error.code()))
            self._is_over.wait(1.0)
            return
        if num_tokens < _NUM_TOKENS:
            self._note(None, f"ended after {num_tokens} of {_NUM_TOKENS} tokens")

    def _note(self, gap_s: float | None, error: str) -> None:
        with self._lock:
            if gap_s is not None:
                self._gaps.seconds.append(gap_s)
            if error:
                self._gaps.errors.append(error)


def main(
    attack: Annotated[list[str] | None, typer.Option(help="Only attacks whose names have this; repeatable.")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint (default: the default model).")] = None,
) -> None:
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    chosen = {name: each for name, each in ATTACKS.items() if not attack or any(part in name for part in attack)}
    rows = []
    with started_server(model or ensure_default_checkpoint(), console) as server:
        doors = Doors(server.http_url, server.grpc_url)
        for name, each in chosen.items():
            rows.append(try_attack(name, each, server, doors))
            console.print(describe(rows[-1]), markup=False, soft_wrap=True)
            server.wait_ready()
    console.print(render(rows))
    raise typer.Exit(int(any(row.verdict != "fine" for row in rows)))


def describe(row: Row) -> str:
    """One line, for who watches."""
    gaps = f"{row.quiet.p99_ms:.0f} -> {row.under.p99_ms:.0f} ms"
    return f"{row.name}: {row.verdict}, longest gaps {gaps}; attacker: {row.met}"


def try_attack(name: str, attack: Attack, server: ServerProcess, doors: Doors) -> Row:
    """Watch the victim for some time, then during the attack."""
    with Victim(doors) as victim:
        time.sleep(_QUIET_S)
        quiet, engine, before = victim.take(), engine_pid(server), num_bytes_of(server)
        with _attacker() as attacker:
            future = attacker.submit(attack, doors)
            time.sleep(_MIN_ATTACK_S)
            met = future.result(_ATTACK_TIMEOUT_S)
        under = victim.take()
        return Row(name, quiet, under, (before, num_bytes_of(server)), met, engine_pid(server) == engine)


def engine_pid(server: ServerProcess) -> int | None:
    """None while there is none."""
    return next((process.pid for process in _processes(server) if ENGINE_MODULE in process.cmdline()), None)


def num_bytes_of(server: ServerProcess) -> int:
    """Resident memory of all processes of a server."""
    return sum(process.memory_info().rss for process in _processes(server))


def num_tokens_of(response: service_pb2.ModelInferResponse) -> int:
    """How many tokens a stream has told so far; a response has several where the server was faster than the client."""
    place = [output.name for output in response.outputs].index("num_output_tokens_so_far")
    return int(np.frombuffer(response.raw_output_contents[place], np.int32)[0])


def render(rows: list[Row]) -> Table:
    """The table, a row for each attack, as Markdown has it."""
    names = ("victim's gaps quiet, p50, p99 (ms)", "under it", "memory before, after (MiB)")
    right = [Column(name, justify="right") for name in names]
    table = Table("attack", *right, "attacker met", "verdict", box=MARKDOWN)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.quiet.p50_ms:.0f}, {row.quiet.p99_ms:.0f}",
            f"{row.under.p50_ms:.0f}, {row.under.p99_ms:.0f}",
            f"{row.num_bytes[0] // _MIB}, {row.num_bytes[1] // _MIB}",
            row.met,
            row.verdict,
        )
    return table


@contextmanager
def _attacker() -> Iterator[ProcessPoolExecutor]:
    """A process whose interpreter the victim's clock does not share."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as attacker:
        yield attacker


def _processes(server: ServerProcess) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in {server.pid, *marked_processes(server.token)}]


def _victims_request() -> object:
    return infer_request(
        "generation",
        VICTIM_REQUEST_ID,
        text_input=[["Tell me about the sea."]],
        max_tokens=[[_NUM_TOKENS]],
        end_id=[[-1]],
        streaming=[[True]],
    )
