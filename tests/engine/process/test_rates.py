from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_engine.errors import RateExceeded
from multilora_engine.process.routes import RateLimits
from multilora_engine.request import Sender


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def wait_of(rates: RateLimits, sender: Sender, num_requests: int = 1) -> float:
    """Seconds that a request would have to wait; 0: it was accepted."""
    try:
        rates.admit(sender, num_requests)
    except RateExceeded as error:
        return float(re.findall(r"come back in ([\d.]+) s", str(error))[0])
    return 0.0


def test_a_minutes_requests_go_at_once_and_the_next_one_when_there_is_one_left(clock: Clock) -> None:
    rates, sender = RateLimits(clock), Sender(key_id="a", requests_per_minute=6)
    assert [wait_of(rates, sender) for _ in range(7)] == [0, 0, 0, 0, 0, 0, 10.0]
    clock.now_s += 9
    assert wait_of(rates, sender) == 1.0
    clock.now_s += 1
    assert [wait_of(rates, sender) for _ in range(2)] == [0, 10.0]


def test_tokens_are_owed_until_time_has_paid_them(clock: Clock) -> None:
    rates, sender = RateLimits(clock), Sender(key_id="a", tokens_per_minute=60)
    assert wait_of(rates, sender) == 0
    rates.charge(sender, 100)
    assert wait_of(rates, sender) == 41.0
    clock.now_s += 41
    assert wait_of(rates, sender) == 0


def test_keys_have_allowances_of_their_own_and_none_is_no_limit(clock: Clock) -> None:
    rates = RateLimits(clock)
    first, second = (Sender(key_id=key, requests_per_minute=1) for key in "ab")
    assert [wait_of(rates, sender) for sender in (first, first, second)] == [0, 60.0, 0]
    assert [wait_of(rates, Sender(key_id="c"), 1000) for _ in range(3)] == [0, 0, 0]


def test_a_refused_request_takes_nothing(clock: Clock) -> None:
    rates, sender = RateLimits(clock), Sender(key_id="a", requests_per_minute=1, tokens_per_minute=60)
    rates.charge(sender, 60)
    assert [wait_of(rates, sender) for _ in range(5)] == [1.0] * 5
    clock.now_s += 1
    assert wait_of(rates, sender) == 0


@given(
    per_minute=st.integers(1, 100),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 20)), max_size=60),
)
def test_no_span_of_time_has_more_than_its_share_but_for_one_minutes_worth_and_one_request(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    rates, sender = RateLimits(clock), Sender(key_id="a", requests_per_minute=per_minute)
    started, accepted = clock.now_s, 0
    for seconds, num_requests in steps:
        clock.now_s += seconds
        before = accepted
        if wait_of(rates, sender, num_requests) == 0:
            accepted += num_requests
        assert before <= per_minute * (1 + (clock.now_s - started) / 60) + 20
    assert accepted <= per_minute * (1 + (clock.now_s - started) / 60) + 20
