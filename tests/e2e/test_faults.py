"""`multilora-serve` itself under load, in peace and when it is hurt: nobody is left without an answer, no answer is
wrong, and nothing that was acknowledged is lost.

A selection; scripts/run inject_faults has all faults, and scripts/run soak_serving goes on for as long as one likes.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from support.wire import stream, tensors, text_of

from checkpoints.telling_adapters import BASE_TOKEN
from trials.inject_faults import FAULTS, Scene, inject, stage
from trials.soak_memory import SHARED_MEMORY
from trials.soak_serving import Record, Soak

PROCESSES = {"serve", "tritonserver", "engine", "generation", "generation_unary", "preprocessing", "postprocessing"}
SELECTED = ("engine: SIGKILL", "engine hangs: SIGSTOP", "disk tier: disk full")
CLOCK = tuple(fault.name for fault in FAULTS if fault.name.startswith("wall clock"))


NUM_TOKENS, NUM_STREAMS, NUM_SEQUENCES = 400, 4, 16
"""Tokens of a sequence, streams, and sequences of a stream: so many that the engine is at them for longer than a busy
machine takes to show the first token of each stream.
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "server.log"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[Scene]:
    with stage(num_clients=4, directory=tmp_path_factory.mktemp("faults"), log=log, has_own_clock=True) as scene:
        yield scene


def test_a_short_soak_has_no_wrong_lost_or_stuck_request_and_measures_every_process(scene: Scene) -> None:
    record = Record()
    Soak(scene, record, seconds=6, interval_s=1, say=print).run()
    tally = scene.load.new_tally()
    assert (record.deaths, record.silent) == ([], set())
    assert (tally.wrong, tally.lost, tally.stuck) == ([], set(), 0)
    assert tally.seen["right"] > 20
    assert tally.messages == {}
    (stretch,) = record.stretches
    assert PROCESSES | {SHARED_MEMORY} <= stretch.num_bytes.keys()
    assert all(min(sizes) > 0 for sizes in stretch.num_bytes.values())


@pytest.mark.parametrize("name", [*SELECTED, *CLOCK])
def test_a_fault_costs_no_more_than_it_explains(scene: Scene, name: str) -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    assert inject(fault, scene).complaints == []


def test_sigterm_lets_what_is_in_flight_end_even_an_ensemble(scene: Scene, log: Path) -> None:
    """The last test: it ends the server. The engine stands still until it has been told, so that it cannot be done.

    Over gRPC: this engine is faster than Triton's HTTP front on a busy machine, which then drops the end of a stream.
    """
    request = tensors(
        text_input="<100>", max_tokens=NUM_TOKENS, end_id=-1, num_return_sequences=NUM_SEQUENCES, stream=True
    )
    engine = scene.server.processes()["engine"]
    with ThreadPoolExecutor(1) as pool:
        with ExitStack() as stack:
            opened = (stream(scene.server.grpc_url, "ensemble", request) for _ in range(NUM_STREAMS))
            streams = [stack.enter_context(each) for each in opened]
            texts = [text_of(each.next()) for each in streams]
            engine.suspend()
            # A process that has not had a processor since takes a later SIGTERM first, so that it is pending no more.
            wait_until(lambda: engine.status() == psutil.STATUS_STOPPED)
            status = pool.submit(scene.server.terminate)
            wait_until(lambda: is_pending(signal.SIGTERM, engine))
            engine.resume()
            for i, each in enumerate(streams):
                texts[i] += "".join(map(text_of, each))
        assert [text.count(f"<{BASE_TOKEN}>") for text in texts] == [NUM_SEQUENCES * NUM_TOKENS] * NUM_STREAMS
        assert status.result() == 0
    # One more may be the canary's.
    in_flight = re.search(r"no more requests are taken, (\d+) are in flight", log.read_text())
    assert in_flight
    assert 1 <= int(in_flight[1]) <= NUM_STREAMS * NUM_SEQUENCES + 1


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not is_so():
        assert time.monotonic() < deadline
        os.sched_yield()


def is_pending(wanted: signal.Signals, process: psutil.Process) -> bool:
    """Whether a process that stands still has been sent the signal."""
    pending = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    assert pending
    return bool(int(pending[1], 16) >> (wanted - 1) & 1)
