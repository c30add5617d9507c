from __future__ import annotations

from random import Random
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from multilora_engine.engine.fair_shares import choose_victim
from multilora_engine.request import GenerationRequest, SamplingParams, Sender
from multilora_engine.sequences.sequence import Sequence
from multilora_engine.text.text_stream import TextStream

NUM_PLACES = 4


def sequence(client: str, priority: int = 0, weight: float = 1.0) -> Sequence:
    sender = Sender(name=client, weight=weight)
    request = GenerationRequest("r", [1], SamplingParams(1), priority=priority, sender=sender)
    return Sequence(request, 0, None, cast(TextStream, None), Random(0), 1)


def victim(newcomer: Sequence, running: list[Sequence]) -> Sequence | None:
    return choose_victim(newcomer, 1 / NUM_PLACES, running, lambda _: 1 / NUM_PLACES)


def test_the_last_that_started_of_a_client_with_more_than_its_share_gives_way() -> None:
    running = [sequence(client) for client in ("acme", "acme", "acme", "bolt")]
    assert victim(sequence("bolt"), running) is running[2]


def test_who_has_no_more_than_its_share_stays() -> None:
    running = [sequence(client) for client in ("acme", "acme", "bolt", "bolt")]
    assert victim(sequence("bolt"), running) is None
    assert victim(sequence("acme"), running) is None


def test_a_share_goes_by_the_weight() -> None:
    running = [sequence("acme", weight=3.0) for _ in range(NUM_PLACES)]
    assert victim(sequence("bolt"), running) is running[-1]
    assert victim(sequence("bolt"), [*running[:3], sequence("bolt")]) is None


def test_what_is_more_urgent_stays() -> None:
    running = [sequence("acme", priority=-1) for _ in range(NUM_PLACES)]
    assert victim(sequence("bolt"), running) is None
    assert victim(sequence("bolt", priority=-1), running) is running[-1]


@given(running=st.lists(st.sampled_from("abc"), max_size=NUM_PLACES), newcomer=st.sampled_from("abc"))
def test_nobody_is_left_with_less_than_the_newcomer_gets(running: list[str], newcomer: str) -> None:
    sequences = [sequence(client) for client in running]
    chosen = victim(sequence(newcomer), sequences)
    if chosen is not None:
        loser = chosen.request.sender.name
        assert loser != newcomer
        assert running.count(loser) - 1 >= running.count(newcomer)
