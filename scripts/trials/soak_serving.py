"""A real server under mixed load for as long as you like: does memory stay flat, and is every answer right?

Clients ask the base model and adapters that do not all fit into memory, upload, cancel and send requests that are wrong
(judging_clients.py); each call has a deadline, and one that passes it counts as stuck. Meanwhile the anonymous
memory of every process of the server, and the bytes in /dev/shm, are measured; each gets a straight line fitted by
least squares, after a warm-up. Memory that grows shows as a slope that its error bars cannot explain
(soak_memory.py).

The tritonserver of PyPI can crash when gRPC calls are cancelled (SECURITY.md), and this load cancels many. That one
death is told, counted and lived with: it must have been the first of the server's processes to die, by a signal of a
crash (SIGSEGV, SIGABRT), and `multilora-serve` must have it back in time, every client answered. The errors that
clients see until then are counted, not judged; but an adapter that was acknowledged and no longer answers, an answer
that is wrong and a request that is stuck are failures as ever. Memory is judged from one start of the server to its
end. A stretch that is too short to tell growth from a start is told as such, and a soak that has no other has not
passed.

Every other death ends the soak as a failure: of the engine, of a model's process, of `multilora-serve`, and of a
tritonserver that hung, ran out of memory (SIGKILL) or ended with a status.

It outlives the terminal it was started from: scripts/run soak_serving --minutes 60 > soak.log 2>&1 &
"""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from marked_tables import console_table
from multilora_client import Client, MultiloraClientError
from trials.inject_faults import Scene, stage
from trials.judging_clients import ANSWER_TIMEOUT_S, Tally
from trials.process_deaths import Deaths
from trials.soak_memory import SHORTEST_JUDGED_S, Stretch, measure

_CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT)
_ENDED = re.compile(r"^tritonserver was ended by signal (\d+) ")
_RECOVERY_TIMEOUT_S = 150.0
_REPORT_INTERVAL_S = 300.0
_WIDTH = 110
_JUDGED = f"Memory is judged in what lasts longer than {SHORTEST_JUDGED_S / 60:g}."
_BAD_REQUESTS: Sequence[Mapping[str, object]] = (
    {"input_ids": [10**6], "max_tokens": 1},
    {"input_ids": [1], "max_tokens": -1},
    {"input_ids": [1], "max_tokens": 1, "adapter": 10**6},
)
"""An id outside the vocabulary, an answer of no tokens, an adapter that no client sent."""


@dataclass(frozen=True)
class Death:
    """The server lost a process.

    at_s: of the soak. first: the process that died first; several where no order was seen. reason: the words of
    multilora-serve when it started tritonserver again, if it did. recovery_s: from the death until every client was
    answered again, None if one was not. errors: the errors that clients saw in that time, by code.
    """

    at_s: float
    first: frozenset[str]
    reason: str = ""
    recovery_s: float | None = None
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_excused(self) -> bool:
        return "tritonserver" in self.first and is_crash(self.reason)

    @property
    def complaint(self) -> str:
        """The complaint about a death; empty for a crash of tritonserver that was mended."""
        if not self.is_excused:
            return f"{', '.join(sorted(self.first))} died" + (f": {self.reason}" if self.reason else "")
        return "" if self.recovery_s is not None else "the restarted server does not answer every client"


@dataclass
class Record:
    """The measurements and events. A stretch ends with a death. silent: adapters without an answer at last."""

    stretches: list[Stretch] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    silent: Collection[int] = ()

    @property
    def complaints(self) -> list[str]:
        growing = [
            f"{name} grows{self._where(number)}"
            for number, stretch in enumerate(self.stretches, start=1)
            for name in stretch.growing
        ]
        is_judged = any(stretch.is_judged for stretch in self.stretches)
        return [
            *(death.complaint for death in self.deaths if death.complaint),
            *growing,
            *([] if is_judged else [f"memory is not judged: no stretch of {SHORTEST_JUDGED_S / 60:g} minutes"]),
            *([f"{len(self.silent)} adapters do not answer"] if self.silent else []),
        ]

    def _where(self, number: int) -> str:
        return f" in stretch {number}" if len(self.stretches) > 1 else ""


def is_crash(reason: str) -> bool:
    """Whether multilora-serve says that tritonserver ended by a signal that it raised itself."""
    ended = _ENDED.search(reason)
    return ended is not None and int(ended[1]) in _CRASH_SIGNALS


def send_bad_requests(scene: Scene) -> None:
    with Client(f"http://{scene.server.http_url}") as client:
        for request in _BAD_REQUESTS:
            with suppress(MultiloraClientError):
                client.generate(**request, timeout_s=ANSWER_TIMEOUT_S)  # type: ignore[arg-type]
                raise AssertionError(f"{request} was answered")


class Soak:
    """One soak of a server: load, measure into `record`, tell every few minutes."""

    def __init__(
        self, scene: Scene, record: Record, seconds: float, interval_s: float, say: Callable[[str], None]
    ) -> None:
        self._scene = scene
        self._record = record
        self._seconds = seconds
        self._interval_s = interval_s
        self._say = say
        self._roles = frozenset[str]()
        self._errors_before = Counter[str]()
        self._next_report_s = _REPORT_INTERVAL_S

    def run(self) -> None:
        """Run until the time is up, or a process dies that must not.

        Raises a client's exception that is no answer of the server, and AssertionError for a server that ended.
        """
        with self._scene.load.running():
            self._started = time.monotonic()
            while self._now() < self._seconds:
                num_ready, num_restarts = self._scene.server.num_ready, len(self._scene.server.restarts)
                if not (first := self._live()):
                    break
                if not self._recover(Death(self._now(), first), num_ready, num_restarts):
                    return
        self._record.silent = self._scene.load.ask_all()

    def _now(self) -> float:
        return time.monotonic() - self._started

    def _live(self) -> frozenset[str]:
        """Run one stretch; the server's processes that died first and ended it, none if the time did."""
        processes, stretch = self._scene.server.processes(), Stretch()
        self._roles |= processes.keys()
        self._record.stretches.append(stretch)
        if missing := self._roles - processes.keys():
            return missing
        with Deaths(processes) as deaths:
            while self._now() < self._seconds:
                self._errors_before = self._scene.load.num_errors()
                with suppress(psutil.NoSuchProcess):
                    stretch.add(self._now(), measure(processes, self._scene.server.shared_memory))
                send_bad_requests(self._scene)
                self._report(stretch)
                if first := deaths.wait(self._interval_s):
                    return first
        return frozenset()

    def _recover(self, death: Death, num_ready: int, num_restarts: int) -> bool:
        """Wait for the server to be as before, and note the cost; whether the soak goes on.

        num_ready, num_restarts: the server's, before the death.
        """
        self._record.deaths.append(death)
        if "tritonserver" not in death.first:
            return False
        server = self._scene.server
        server.wait_ready(num_ready + 1)
        death = replace(death, reason=server.restarts[num_restarts])
        self._record.deaths[-1] = death
        with suppress(TimeoutError):
            self._scene.load.wait_until_all_are_right(_RECOVERY_TIMEOUT_S)
            errors = self._scene.load.num_errors() - self._errors_before
            death = replace(death, recovery_s=self._now() - death.at_s, errors=errors)
            self._record.deaths[-1] = death
        self._say(f"{death.at_s / 60:.1f} minutes: {describe(death)}")
        return not death.complaint

    def _report(self, stretch: Stretch) -> None:
        if self._now() > self._next_report_s:
            self._say(_progress(self._now(), stretch, self._scene.load.tally))
            self._next_report_s += _REPORT_INTERVAL_S


def describe(death: Death) -> str:
    errors = ", ".join(f"{count} {code}" for code, count in sorted(death.errors.items())) or "no errors"
    saw = (
        "" if death.recovery_s is None else f"; clients saw {errors}, all were answered after {death.recovery_s:.1f} s"
    )
    return f"{', '.join(sorted(death.first))} died" + (f": {death.reason}" if death.reason else "") + saw


def _progress(now: float, stretch: Stretch, tally: Tally) -> str:
    total = sum(sizes[-1] for sizes in stretch.num_bytes.values()) / (1 << 20)
    counts = f"{tally.seen['right']:,} right, {len(tally.wrong)} wrong, {len(tally.lost)} lost, {tally.stuck} stuck"
    return f"{now / 60:.0f} minutes: {counts}; {total:.0f} MiB"


def render(record: Record, tally: Tally) -> list[Table]:
    return [*(_memory_table(stretch) for stretch in record.stretches if stretch.seconds), _answers_table(tally)]


def _memory_table(stretch: Stretch) -> Table:
    columns = ("after warm-up, MiB", "at the end, MiB", "slope, MiB/h", "standard error", "")
    heading = f"minutes {stretch.seconds[0] / 60:.1f}-{stretch.seconds[-1] / 60:.1f}"
    lines = {name: stretch.line(name) for name in stretch.num_bytes}
    rows = [
        (
            name,
            f"{line.first:.1f}",
            f"{line.last:.1f}",
            f"{line.slope:+.2f}",
            f"{line.error:.2f}",
            stretch.verdict(name),
        )
        for name, line in lines.items()
    ]
    return console_table((heading, *columns), rows, numbers=range(1, 5))


def _answers_table(tally: Tally) -> Table:
    failed = {"wrong": len(tally.wrong), "lost": len(tally.lost), "stuck": tally.stuck}
    counts = {**dict(sorted(tally.seen.items())), **failed}
    return console_table(("answers", "count"), [(name, f"{n:,}") for name, n in counts.items()], numbers=(1,))


def conclude(record: Record, tally: Tally, console: Console) -> bool:
    """Print the record and the tally. Returns whether both are right."""
    for table in render(record, tally):
        console.print(table)
    for death in record.deaths:
        console.print(f"{death.at_s / 60:.1f} minutes: {describe(death)}", markup=False, soft_wrap=True)
    complaints = [
        *record.complaints,
        *tally.wrong[:5],
        *([f"{len(tally.lost)} adapters are lost"] if tally.lost else []),
        *([f"{tally.stuck} requests were stuck"] if tally.stuck else []),
    ]
    num_crashes = sum(death.is_excused for death in record.deaths)
    restarts = f"tritonserver crashed and was started again: {num_crashes}"
    verdict = f"FAILED: {'; '.join(complaints)}" if complaints else "PASSED"
    console.print(f"{restarts}\n{verdict}", markup=False, soft_wrap=True)
    return not complaints


def main(
    minutes: Annotated[float, typer.Option(help=f"How long. {_JUDGED}", min=0.1)] = 60.0,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 8,
    interval: Annotated[float, typer.Option(help="Seconds between measurements.", min=0.1)] = 5.0,
    log: Annotated[Path | None, typer.Option(help="Append the server's log to this file.")] = None,
) -> None:
    """Soak a server. Ends with status 1 for memory that grows, for an answer that is wrong, lost or stuck, and for a
    process that dies, unless it is the known crash of tritonserver: that is counted.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    console = Console(width=_WIDTH, highlight=False)
    console.print(f"{clients} clients for {minutes:g} minutes; a line every {_REPORT_INTERVAL_S / 60:g}")
    with tempfile.TemporaryDirectory(prefix="multilora-soak-") as name, stage(clients, Path(name), log) as scene:
        record = Record()
        try:
            Soak(scene, record, minutes * 60, interval, partial(console.print, soft_wrap=True)).run()
        finally:
            is_right = conclude(record, scene.load.tally, console)
    raise typer.Exit(0 if is_right else 1)
