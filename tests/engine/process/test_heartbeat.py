from __future__ import annotations

import os

import pytest

from multilora_engine.process.heartbeat import LOOKS_PER_TIMEOUT, Heartbeat, Pulse, heartbeat_file


def test_who_reads_sees_what_who_writes_counts() -> None:
    fd = heartbeat_file()
    writer, reader = Heartbeat(fd, None), Heartbeat(fd, None)
    os.close(fd)
    assert reader.count == 0
    for _ in range(3):
        writer.beat()
    assert reader.count == 3


STILL = LOOKS_PER_TIMEOUT


@pytest.mark.parametrize(
    ("counts", "has_stopped"),
    [
        ([0] * 100 * STILL, False),
        ([0, 0, *[1] * STILL], False),
        ([0, 0, *[1] * (STILL + 1)], True),
        ([0, *[7] * STILL, *[8] * STILL], False),
        ([*range(1, 100), *[100] * (STILL + 1)], True),
    ],
    ids=["a long load", "not yet", "after the first beat", "a beat in time", "after many beats"],
)
def test_a_pulse_has_stopped_after_so_many_looks_without_a_beat(counts: list[int], has_stopped: bool) -> None:
    pulse = Pulse()
    looks = [pulse.has_stopped(count) for count in counts]
    assert looks == [False] * (len(counts) - 1) + [has_stopped]
