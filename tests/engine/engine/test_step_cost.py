"""The measured cost of steps against steps whose cost is known."""

from __future__ import annotations

from random import Random

import pytest

from multilora_engine.engine.step_cost import StepCost, StepWork


def true_seconds(work: StepWork, factor: float = 1.0) -> float:
    linear = 2e-3 * work.num_decodes + 1e-3 * work.num_beams + 8e-4 * work.num_prompt_tokens
    return factor * (2e-2 + linear + 5e-4 * work.num_prompt_rows)


def random_work(random: Random) -> StepWork:
    num_decodes = random.randrange(65)
    num_prompt_tokens = random.choice([0, random.randrange(2, 257)])
    return StepWork(
        num_decodes,
        num_beams=random.choice([0, num_decodes]),
        has_prompts=int(num_prompt_tokens > 0),
        num_prompt_tokens=num_prompt_tokens,
        num_prompt_rows=random.choice([0, num_prompt_tokens]),
    )


def observed(num_steps: int, noise: float = 0.0, seed: int = 0) -> StepCost:
    cost, random = StepCost(), Random(seed)
    for _ in range(num_steps):
        work = random_work(random)
        cost.observe(work, true_seconds(work) * random.uniform(1 - noise, 1 + noise))
    return cost


def test_nothing_is_known_before_the_first_step() -> None:
    assert not StepCost().is_known
    assert observed(1).is_known


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_steps_of_all_kinds_are_foretold(noise: float) -> None:
    cost, random = observed(400, noise), Random(1)
    for _ in range(50):
        work = random_work(random)
        assert cost.seconds(work) == pytest.approx(true_seconds(work), rel=0.02 + noise)
    assert cost.seconds_added(StepWork(num_prompt_tokens=100)) == pytest.approx(0.08, rel=0.02 + noise)


def test_no_kind_of_work_is_expected_to_save_time() -> None:
    cost = StepCost()
    for num_decodes in range(1, 65):
        cost.observe(StepWork(num_decodes, num_prompt_tokens=128 - num_decodes), 0.1 - 1e-3 * num_decodes)
    for work in (StepWork(1), StepWork(num_prompt_tokens=1), StepWork(num_beams=1), StepWork(num_prompt_rows=1)):
        assert cost.seconds_added(work) >= 0


def test_one_step_that_took_long_by_chance_changes_little() -> None:
    cost = observed(400)
    before = cost.seconds(StepWork(8))
    cost.observe(StepWork(8), 100 * before)
    assert cost.seconds(StepWork(8)) < 1.5 * before


def test_the_slow_first_steps_of_a_machine_are_soon_forgotten() -> None:
    cost = StepCost()
    for seconds in (1.3, 0.85):
        cost.observe(StepWork(1, num_decode_keys=1), seconds)
    cost.observe(StepWork(has_prompts=1, num_prompt_tokens=6, num_prompt_keys=21), 0.046)
    for num_decode_keys in range(11, 91, 8):
        work = StepWork(1, num_decode_keys=num_decode_keys)
        cost.observe(work, true_seconds(work))
    assert cost.seconds(StepWork(1, num_decode_keys=60)) == pytest.approx(true_seconds(StepWork(1)), rel=0.1)


def test_chance_in_short_contexts_is_not_multiplied_in_long_ones() -> None:
    cost = StepCost()
    for num_keys in (10, 30, 50, 70) * 10:
        work = StepWork(1, num_decode_keys=num_keys)
        cost.observe(work, true_seconds(work) + 1e-5 * num_keys)
    assert cost.seconds(StepWork(1, num_decode_keys=4000)) < 1.2 * cost.seconds(StepWork(1, num_decode_keys=40))
    for num_keys in (1000, 2000, 4000) * 10:
        work = StepWork(1, num_decode_keys=num_keys)
        cost.observe(work, true_seconds(work) + 1e-5 * num_keys)
    assert cost.seconds(StepWork(1, num_decode_keys=4000)) == pytest.approx(true_seconds(StepWork(1)) + 0.04, rel=0.05)


def test_a_machine_that_becomes_slower_is_known_to_be() -> None:
    cost, random = observed(400), Random(2)
    for _ in range(800):
        work = random_work(random)
        cost.observe(work, true_seconds(work, factor=4.0))
        cost.seconds(work)
    assert cost.seconds(StepWork(8)) == pytest.approx(true_seconds(StepWork(8), factor=4.0), rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_while_every_step_has_tokens_of_prompts_it_stays_known_how_long_answers_alone_take(noise: float) -> None:
    cost, random, decode, context = StepCost(), Random(2), StepWork(1, num_decode_keys=60), 0
    for _ in range(60):
        cost.observe(decode, true_seconds(decode))
    cost.observe(StepWork(num_prompt_tokens=20, num_prompt_keys=210), 0.04)
    for _ in range(1500):
        target_s, token = 2.5 * cost.seconds(decode), StepWork(num_prompt_tokens=1, num_prompt_keys=context + 1)
        num_tokens = max(1, int((target_s - cost.seconds(decode)) / cost.seconds_added(token)))
        keys = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        work = StepWork(1, num_prompt_tokens=num_tokens, num_decode_keys=60, num_prompt_keys=keys)
        cost.observe(work, (true_seconds(work) + 1.5e-7 * keys) * random.uniform(1, 1 + noise))
        context = (context + num_tokens) % 4000
    assert cost.seconds(decode) == pytest.approx(true_seconds(decode), rel=0.03 + noise / 2)


def test_prompts_that_cost_much_from_their_first_token_on_leave_the_time_of_answers_as_it_is() -> None:
    cost, random = StepCost(), Random(4)
    for _ in range(400):
        num_tokens = random.choice([0, 6, 20, 256])
        work = StepWork(1, has_prompts=int(num_tokens > 0), num_prompt_tokens=num_tokens)
        cost.observe(work, true_seconds(work) + 0.02 * work.has_prompts)
    assert cost.seconds(StepWork(1)) == pytest.approx(true_seconds(StepWork(1)), rel=0.01)
    assert cost.seconds_added(StepWork(has_prompts=1)) == pytest.approx(0.02, rel=0.01)
