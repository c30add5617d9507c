"""The work that a step may have, by known costs: 20 ms, 1 ms a decode, 0.5 ms a token of a prompt, as much a row."""

from __future__ import annotations

from random import Random
from typing import Any, cast

import msgspec
import pytest
from support.fronts import generation_request
from support.known_pace import PROMPT_TOKEN_S, known_pace

from multilora_engine.engine.engine_stats import PaceStats
from multilora_engine.engine.pace import Pace, PromptTime
from multilora_engine.engine.step_cost import StepWork
from multilora_engine.request import Sender
from multilora_engine.sequences.sequence import Sequence
from multilora_engine.text.text_stream import TextStream


def sequence(client: str = "", weight: float = 1.0, **sampling: Any) -> Sequence:
    request = generation_request("r", [1] * 1000)
    request = msgspec.structs.replace(
        request,
        sender=Sender(name=client, weight=weight),
        sampling=msgspec.structs.replace(request.sampling, **sampling),
    )
    return Sequence(request, 0, None, cast(TextStream, None), Random(0), max_output_tokens=1)


def prompt_tokens(time: PromptTime, one: Sequence, budget: int = 256) -> int:
    return time.room_for(one, budget)


@pytest.mark.parametrize(
    ("target_s", "num_decodes", "num_tokens"),
    [
        (None, 1, 63),  # 52.5 ms in all, 21 of them for the answer
        (None, 20, 120),
        (None, 80, 256),  # as many as the budget has
        (0.060, 20, 40),
        (0.030, 20, 40),  # a third of the step, where the target cannot be kept
        (0.010, 1, 21),
        (0.0, 20, 256),
        (None, 0, 256),
        (0.030, 0, 256),
    ],
)
def test_prompts_get_the_time_that_running_answers_leave_and_a_third_at_least(
    target_s: float | None, num_decodes: int, num_tokens: int
) -> None:
    paced = known_pace(target_s)
    decodes = paced.choose([sequence() for _ in range(num_decodes)])
    assert len(decodes.sequences) == num_decodes
    time = paced.prompt_time(decodes)
    assert prompt_tokens(time, sequence()) == pytest.approx(num_tokens, abs=1)


def test_tokens_whose_logits_are_wanted_cost_more_and_the_time_is_shared() -> None:
    paced = known_pace(None)
    time = paced.prompt_time(paced.choose([sequence() for _ in range(20)]))
    with_logits = sequence(return_context_logits=True)
    assert prompt_tokens(time, with_logits) == pytest.approx(60, abs=1)
    time.take(with_logits, 30)
    assert prompt_tokens(time, sequence()) == pytest.approx(60, abs=1)
    time.take(sequence(), 60)
    assert prompt_tokens(time, sequence()) <= 1


def test_the_first_prompt_of_a_step_computes_a_token_whatever_it_costs() -> None:
    paced = known_pace(0.001)
    paced.cost.seconds_added = lambda work: 1e3 * work.num_prompt_rows  # type: ignore[method-assign]
    time = paced.prompt_time(paced.choose([sequence()]))
    expensive = sequence(return_context_logits=True)
    assert prompt_tokens(time, expensive) == 1
    time.take(expensive, 1)
    assert prompt_tokens(time, expensive) == 0


def test_answers_of_one_client_or_of_clients_within_their_shares_all_get_a_token() -> None:
    paced = known_pace(0.001)
    for clients in (["a"] * 60, ["a", "b"] * 30, [""] * 9):
        decoding = [sequence(client) for client in clients]
        assert paced.choose(decoding).sequences == decoding


def test_a_client_over_its_share_takes_turns_so_that_the_others_need_not_wait_for_all_of_it() -> None:
    paced = known_pace(None)
    victim, attackers = sequence("victim"), [sequence("attacker") for _ in range(63)]
    decoding = [*attackers[:30], victim, *attackers[30:]]
    turns = dict.fromkeys(attackers, 0)
    for _ in range(63):
        decodes = paced.choose(decoding)
        assert victim in decodes.sequences
        assert decodes.sequences == [one for one in decoding if one in set(decodes.sequences)], "another order"
        # 21 ms are the victim's own, and half of the other 21 are left to the others.
        assert len(decodes.sequences) == pytest.approx(1 + 10, abs=1)
        assert decodes.within == [victim]
        for one in decodes.sequences:
            if one is not victim:
                turns[one] += 1
    assert max(turns.values()) - min(turns.values()) <= 1


def test_prompts_get_less_beside_answers_of_another_client() -> None:
    paced = known_pace(None)
    # 2 x 21 ms less 21 ms of the answer.
    assert prompt_tokens(paced.prompt_time(paced.choose([sequence("a")]), is_shared=True), sequence("b")) == 42
    exact = known_pace(0.060)
    time = exact.prompt_time(exact.choose([sequence("a")]), is_shared=True)
    assert prompt_tokens(time, sequence("b")) == pytest.approx(78, abs=1)


def test_prompts_of_a_burst_count_as_answers_unless_other_clients_have_work() -> None:
    paced, answers, burst = known_pace(None), [sequence()], [sequence() for _ in range(15)]
    # 2 x 36 ms, which sixteen answers will take, less the 21 ms of the one that has begun.
    decodes = paced.choose(answers)
    assert prompt_tokens(paced.prompt_time(decodes, burst=burst), sequence()) == pytest.approx(102, abs=1)
    assert prompt_tokens(paced.prompt_time(decodes, is_shared=True, burst=burst), sequence()) == 42
    exact = known_pace(0.060)
    assert prompt_tokens(exact.prompt_time(exact.choose(answers), burst=burst), sequence()) == pytest.approx(78, abs=1)


def test_a_share_goes_by_weight() -> None:
    decoding = [sequence("light"), *(sequence("heavy", weight=63.0) for _ in range(63))]
    assert known_pace(None).choose(decoding).sequences == decoding


def test_without_a_measured_step_nothing_is_limited() -> None:
    paced = Pace(None)
    decoding = [sequence("victim"), *(sequence("attacker") for _ in range(63))]
    decodes = paced.choose(decoding)
    assert decodes.sequences == decoding
    assert prompt_tokens(paced.prompt_time(decodes), sequence()) == 256


def test_the_target_limited_steps_and_turns_are_told() -> None:
    paced = known_pace(0.0527)
    assert paced.stats == PaceStats()
    for num_tokens in (10, 63):
        time = paced.prompt_time(paced.choose([sequence()]))
        time.take(sequence(), min(num_tokens, time.room_for(sequence(), 256)))
        paced.observe(0.1, StepWork())
    paced.choose([sequence("victim"), *(sequence("attacker") for _ in range(3))])
    assert paced.stats == PaceStats(pytest.approx(0.0527), num_limited_steps=1, num_turns=1)


def test_the_time_since_the_last_step_is_taken_from_prompts_and_from_clients_over_their_shares() -> None:
    paced = known_pace(None)
    paced.interrupt(0.010)
    assert prompt_tokens(paced.prompt_time(paced.choose([sequence()])), sequence()) == pytest.approx(43, abs=1)
    decodes = paced.choose([sequence("victim"), *(sequence("attacker") for _ in range(63))])
    assert len(decodes.sequences) == pytest.approx(1 + 5, abs=1)
    paced.interrupt(10.0)
    assert prompt_tokens(paced.prompt_time(paced.choose([sequence()])), sequence()) == pytest.approx(21, abs=1)


def test_late_prompts_get_as_much_as_without_a_target_in_seconds_and_no_more() -> None:
    cases = ((0.010, False, 63), (0.060, False, 78), (None, False, 63), (0.010, True, 42), (None, True, 42))
    for target_s, is_shared, num_tokens in cases:
        paced = known_pace(target_s)
        time = paced.prompt_time(paced.choose([sequence()]), is_shared, has_late=True)
        assert prompt_tokens(time, sequence()) == pytest.approx(num_tokens, abs=1)


def test_the_price_of_having_prompts_at_all_is_paid_out_of_the_time_that_they_get() -> None:
    paced = known_pace(None)
    linear = paced.cost.seconds_added
    paced.cost.seconds_added = lambda work: linear(work) + 10e-3 * work.has_prompts  # type: ignore[method-assign]
    # 2.5 x 21 ms less 21 ms of the answer leave 31.5 ms.
    assert prompt_tokens(paced.prompt_time(paced.choose([sequence()])), sequence()) == 21.5e-3 // PROMPT_TOKEN_S


def test_chunks_of_a_long_prompt_become_smaller_as_its_context_grows() -> None:
    """A key costs 1 us: at 4,000 keys a token costs nine times as much as the first."""
    paced = known_pace(None)
    linear = paced.cost.seconds_added
    paced.cost.seconds_added = lambda work: linear(work) + 1e-6 * work.num_prompt_keys  # type: ignore[method-assign]
    for context in (0, 1, 500, 4000):
        long, time = sequence(), paced.prompt_time(paced.choose([sequence()]))
        long.num_computed_tokens = context
        num_tokens = prompt_tokens(time, long)
        costs = [PROMPT_TOKEN_S + 1e-6 * (context + 1 + token) for token in range(num_tokens + 1)]
        assert sum(costs[:num_tokens]) <= 0.0315 * (1 + 1e-9) < sum(costs) + 1e-9
        time.take(long, num_tokens)
        assert prompt_tokens(time, long) <= 1


def test_tokens_whose_logits_are_wanted_are_few_while_nobody_has_measured_any() -> None:
    paced = Pace(None)
    paced.observe(0.02, StepWork(1, num_prompt_tokens=0))
    paced.observe(0.02, StepWork(1, num_prompt_tokens=2))
    time = paced.prompt_time(paced.choose([sequence()]))
    assert prompt_tokens(time, sequence()) > 16
    assert prompt_tokens(time, sequence(return_context_logits=True)) == 16
    paced.observe(0.02, StepWork(1, num_prompt_tokens=16, num_prompt_rows=16))
    time = paced.prompt_time(paced.choose([sequence()]))
    assert prompt_tokens(time, sequence(return_context_logits=True)) > 16


def test_steps_whose_work_is_not_told_teach_nothing() -> None:
    paced = Pace(None)
    paced.observe(0.1, None)
    assert not paced.cost.is_known
    paced.observe(0.1, StepWork())
    assert paced.cost.is_known
