"""Open and closed loops on a virtual clock, where every time is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from multilora_client import AsyncClient, Unavailable
from multilora_client.bench.load import Load, make_ask, run_closed, run_load, run_open
from multilora_client.bench.workload import Job, Target, poisson_arrivals

RunVirtual = Callable[[Any], Any]
JOBS = [Job(Target(), f"prompt {number}") for number in range(6)]


def ask_through(transport: Any) -> Any:
    return make_ask(AsyncClient(transport=transport), output_tokens=3, timeout_s=None)


def nothing() -> None:
    pass


def test_a_sample_has_the_time_of_every_piece(run_virtual: RunVirtual, slow_transport: Any) -> None:
    (sample,) = run_virtual(run_open(ask_through(slow_transport()), JOBS[:1], [2.0], nothing))
    assert (sample.due_s, sample.sent_s, sample.piece_times_s, sample.done_s) == (2.0, 2.0, (3.0, 3.5, 4.0), 4.0)
    assert (sample.first_token_s, sample.gaps_s, sample.latency_s) == (1.0, [0.5, 0.5], 2.0)
    assert (sample.text, sample.num_input_tokens, sample.num_output_tokens, sample.error) == ("0 1 2 ", 5, 3, "")


def test_an_open_loop_never_waits_for_answers(run_virtual: RunVirtual, slow_transport: Any) -> None:
    transport = slow_transport(first_s=1000.0)
    arrivals = [0.5, 0.75, 1.0, 1.25, 1.5, 4.0]
    samples = run_virtual(run_open(ask_through(transport), JOBS, arrivals, nothing))
    assert transport.sent_at == arrivals
    assert [sample.job for sample in samples] == JOBS
    assert {sample.latency_s for sample in samples} == {1001.0}


def test_a_wait_in_the_server_counts_from_the_moment_a_request_was_due(
    run_virtual: RunVirtual, slow_transport: Any
) -> None:
    """No coordinated omission: each of the requests after a slow one tells of its own wait."""
    transport = slow_transport(first_s=10.0, gap_s=0.0, capacity=1)
    samples = run_virtual(run_open(ask_through(transport), JOBS[:4], [1.0, 2.0, 3.0, 4.0], nothing))
    assert [sample.first_token_s for sample in samples] == [10.0, 19.0, 28.0, 37.0]


def test_a_client_that_is_late_itself_counts_that_and_tells_it(run_virtual: RunVirtual, slow_transport: Any) -> None:
    ask = ask_through(slow_transport(first_s=1.0))
    samples = run_virtual(run_open(ask, JOBS[:2], [-3.0, 0.0], nothing))
    assert [sample.send_delay_s for sample in samples] == [3.0, 0.0]
    assert [sample.first_token_s for sample in samples] == [4.0, 1.0]


def test_a_closed_loop_keeps_so_many_requests_under_way(run_virtual: RunVirtual, slow_transport: Any) -> None:
    transport = slow_transport()
    samples = run_virtual(run_closed(ask_through(transport), JOBS, 2, nothing))
    assert transport.most_at_once == 2
    assert transport.sent_at == [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]
    assert {sample.send_delay_s for sample in samples} == {0.0}


def test_an_error_is_a_sample_with_its_code(run_virtual: RunVirtual, slow_transport: Any) -> None:
    ask = ask_through(slow_transport(error=Unavailable("full")))
    samples = run_virtual(run_closed(ask, JOBS, 3, nothing))
    assert [(sample.error, sample.piece_times_s) for sample in samples] == [("UNAVAILABLE", ())] * 6


@pytest.mark.parametrize("load", [Load(2.0, is_open=True), Load(2, is_open=False)], ids=str)
def test_every_end_of_a_job_is_told(run_virtual: RunVirtual, slow_transport: Any, load: Load) -> None:
    ended: list[None] = []
    run_virtual(run_load(ask_through(slow_transport()), JOBS, load, 0, lambda: ended.append(None)))
    assert len(ended) == len(JOBS)


def test_an_open_load_arrives_as_drawn_from_its_seed(run_virtual: RunVirtual, slow_transport: Any) -> None:
    transport = slow_transport()
    run_virtual(run_load(ask_through(transport), JOBS, Load(2.0, is_open=True), 7, nothing))
    assert transport.sent_at == pytest.approx(poisson_arrivals(2.0, len(JOBS), seed=7))
