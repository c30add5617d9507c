from __future__ import annotations

from random import Random
from typing import cast

import pytest
from support.fronts import generation_request

from multilora_engine.engine.host_work import HostWork
from multilora_engine.errors import TooMuchHostWork
from multilora_engine.sequences.sequence import Sequence
from multilora_engine.text.text_stream import TextStream


def sequence() -> Sequence:
    return Sequence(generation_request("r", [1]), 0, None, cast(TextStream, None), Random(0), max_output_tokens=1)


def test_who_takes_no_more_than_its_share_may_go_on_for_ever() -> None:
    work, modest = HostWork(0.05), sequence()
    for _ in range(10_000):
        work.charge(modest, 0.0125, num_sharing=4)


def test_who_takes_more_than_its_share_in_step_after_step_ends() -> None:
    work, greedy = HostWork(0.05), sequence()
    for _ in range(5):
        work.charge(greedy, 0.06, num_sharing=4)
    with pytest.raises(TooMuchHostWork, match=r"took 285 ms more .* host_work_ms_per_step is 50, among 4 requests"):
        work.charge(greedy, 0.06, num_sharing=4)


def test_one_step_alone_ends_nobody_and_is_paid_off() -> None:
    work, unlucky = HostWork(0.05), sequence()
    for _ in range(50):
        work.charge(unlucky, 100.0, num_sharing=1)
        work.charge(unlucky, 0.0, num_sharing=1)
    assert unlucky.host_debt_s == 0.0


def test_without_a_budget_nobody_ends() -> None:
    work, greedy = HostWork(0.0), sequence()
    for _ in range(10):
        work.charge(greedy, 100.0, num_sharing=1)
