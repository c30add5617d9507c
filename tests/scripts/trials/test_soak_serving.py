"""How a soak is judged, and how it goes on after a crash; with processes that only play the server's."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from trials.judging_clients import Tally
from trials.soak_memory import SHARED_MEMORY, SHORTEST_JUDGED_S, Stretch
from trials.soak_serving import Death, Record, Soak, conclude, describe, is_crash

MIB = 1 << 20
TRITON = frozenset({"tritonserver"})
SEGFAULT = "tritonserver was ended by signal 11 (Segmentation fault), after: its last line"


def long_stretch(first: int = MIB, last: int = MIB) -> Stretch:
    steps = range(5)
    return Stretch(
        [i / 4 * SHORTEST_JUDGED_S for i in steps], {"engine": [first + (last - first) * i // 4 for i in steps]}
    )


def crash(**fields: Any) -> Death:
    return Death(**{"at_s": 60.0, "first": TRITON, "reason": SEGFAULT, "recovery_s": 20.0, **fields})


SHORT = Stretch([0.0, 1.0], {"engine": [MIB, 2 * MIB]})


@pytest.mark.parametrize(
    ("record", "tally", "complaint"),
    [
        (Record([long_stretch()]), Tally(), ""),
        (Record([long_stretch()]), Tally(Counter({"UNAVAILABLE": 7})), ""),
        (Record([long_stretch(MIB, 9 * MIB)]), Tally(), "engine grows"),
        (Record([SHORT, long_stretch(MIB, 9 * MIB)], [crash()]), Tally(), "engine grows in stretch 2"),
        (Record([SHORT, long_stretch()], [crash()]), Tally(), ""),
        (Record([SHORT, SHORT], [crash()]), Tally(), "memory is not judged: no stretch of 30 minutes"),
        (Record([long_stretch()], [crash(recovery_s=None)]), Tally(), "the restarted server does not answer every"),
        (Record([long_stretch()], [crash(first=frozenset({"engine"}))]), Tally(), "engine died"),
        (Record([long_stretch()], silent={3}), Tally(), "1 adapters do not answer"),
        (Record([long_stretch()]), Tally(wrong=["adapter 3 answered <1>"]), "adapter 3 answered"),
        (Record([long_stretch()]), Tally(lost={4}), "1 adapters are lost"),
        (Record([long_stretch()]), Tally(stuck=2), "2 requests were stuck"),
    ],
)
def test_the_last_lines_tell_the_restarts_and_what_must_not_be(record: Record, tally: Tally, complaint: str) -> None:
    console = Console(file=StringIO(), width=110)
    assert conclude(record, tally, console) is not bool(complaint)
    *_, restarts, last = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert last.startswith("FAILED: " + complaint if complaint else "PASSED")
    assert restarts.endswith(f": {sum(death.is_excused for death in record.deaths)}")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (SEGFAULT, True),
        ("tritonserver was ended by signal 6 (Aborted), after: terminate called", True),
        ("tritonserver was ended by signal 9 (Killed), after: its last line", False),
        ("failed to load all models (tritonserver ended with status 1)", False),
        ("the server no longer answers: no answer within 10 s", False),
        ("", False),
    ],
)
def test_only_a_crash_of_its_own_is_excused(reason: str, expected: bool) -> None:
    assert is_crash(reason) is expected
    assert Death(1.0, TRITON, reason, 20.0).is_excused is expected
    assert bool(Death(1.0, TRITON, reason, 20.0).complaint) is not expected


@pytest.mark.parametrize("first", ["engine", "generation", "serve"])
def test_a_crash_that_another_death_preceded_is_not_excused(first: str) -> None:
    assert crash(first=frozenset({first})).complaint == f"{first} died: {SEGFAULT}"


def test_a_crash_is_told_with_what_clients_saw_of_it() -> None:
    told = describe(crash(errors={"UNAVAILABLE": 12, "INTERNAL": 1}))
    assert told.endswith("clients saw 1 INTERNAL, 12 UNAVAILABLE, all were answered after 20.0 s")


class FakeServer:
    """Its processes are `cat`s; what kills tritonserver is told as multilora-serve does, and other `cat`s take over."""

    def __init__(self, resources: ExitStack, shared_memory: Path) -> None:
        self.shared_memory = shared_memory
        self.restarts = list[str]()
        self.num_ready = 1
        self.http_url = "127.0.0.1:1"
        self._resources = resources
        self._start()

    def _start(self) -> None:
        self._children = {
            name: self._resources.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
            for name in ("tritonserver", "engine")
        }

    def processes(self) -> dict[str, psutil.Process]:
        return {name: psutil.Process(child.pid) for name, child in self._children.items()}

    def wait_ready(self, num_ready: int) -> None:
        status = self._children["tritonserver"].wait()
        assert num_ready == self.num_ready + 1
        self.restarts.append(f"tritonserver was ended by signal {-status} (named so), after: nothing")
        self._start()
        self.num_ready = num_ready

    def kill(self, name: str, signal_number: int) -> None:
        os.kill(self._children[name].pid, signal_number)


class FakeLoad:
    """events: what happens each time the soak reads the errors: before a measurement, and after a recovery."""

    def __init__(self, events: Iterable[Callable[[], None]]) -> None:
        self._events = iter(events)
        self.tally = Tally()

    running = staticmethod(nullcontext)

    def num_errors(self) -> Counter[str]:
        seen = self.tally.seen.copy()
        next(self._events)()
        self.tally.seen["UNAVAILABLE"] += 1
        return seen

    def wait_until_all_are_right(self, timeout_s: float) -> float:
        return 0.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with ExitStack() as resources:
        yield FakeServer(resources, tmp_path)


def soak(server: FakeServer, *events: Callable[[], None]) -> tuple[Record, list[str]]:
    """A soak that events end; what it recorded and what it said."""
    record, said = Record(), list[str]()
    scene: Any = SimpleNamespace(server=server, load=FakeLoad(events))
    Soak(scene, record, seconds=600.0, interval_s=0.05, say=said.append).run()
    return record, said


def test_it_goes_on_with_new_processes_after_a_crash_and_ends_with_any_other_death(server: FakeServer) -> None:
    crash, end = (
        partial(server.kill, *kill) for kill in (("tritonserver", signal.SIGABRT), ("engine", signal.SIGKILL))
    )
    record, said = soak(server, nothing, crash, nothing, nothing, end)
    assert [death.first for death in record.deaths] == [TRITON, {"engine"}]
    assert [death.complaint for death in record.deaths] == ["", "engine died"]
    assert record.deaths[0].errors == {"UNAVAILABLE": 1}
    assert [list(stretch.num_bytes) for stretch in record.stretches] == [["tritonserver", "engine", SHARED_MEMORY]] * 2
    (told,) = said
    assert "tritonserver died: tritonserver was ended by signal 6 " in told


def test_a_tritonserver_that_something_else_killed_ends_it(server: FakeServer) -> None:
    record, _ = soak(server, partial(server.kill, "tritonserver", signal.SIGKILL), nothing)
    assert [death.complaint for death in record.deaths] == [
        "tritonserver died: tritonserver was ended by signal 9 (named so), after: nothing"
    ]


def nothing() -> None:
    """Happens between the events."""
