"""The work that a step may have: by known times, 20 ms and 0.5 ms a token, and by times that it measures."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fronts import generation_request
from support.known_pace import known_pace

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.engine.engine_stats import PaceStats
from multilora_engine.engine.pace import Pace, Step, StepTimes, StepWork
from multilora_engine.request import GenerationRequest, SamplingParams, Sender
from multilora_engine.sequences.sequence import ScheduledSequence, Sequence
from multilora_engine.text.text_stream import TextStream


def sequence(client: str = "", **sampling: Any) -> Sequence:
    request = generation_request("r", [1] * 1000)
    options = msgspec.structs.replace(request.sampling, **sampling)
    request = msgspec.structs.replace(request, sender=Sender(name=client), sampling=options)
    return Sequence(request, 0, None, cast(TextStream, None), Random(0), max_output_tokens=1)


def prompt_tokens(step: Step, one: Sequence | None = None) -> int:
    return step.room_for(one or sequence())


def scheduled(num_tokens: int, one: Sequence | None = None) -> ScheduledSequence:
    return ScheduledSequence(one or sequence(), 1000 if num_tokens == 1 else 0, num_tokens, is_sampled=False)


@pytest.mark.parametrize(
    ("target_s", "num_decodes", "num_tokens"),
    [
        (None, 1, 61),  # 51.25 ms in all, 20.5 of them for the answer
        (None, 20, 90),
        (None, 200, 256),  # as many as the budget has
        (0.060, 20, 60),
        (0.040, 20, 30),  # a third of the step, where the target cannot be kept
        (0.010, 1, 20),
        (0.0, 20, 256),
        (None, 0, 256),
        (0.030, 0, 256),
    ],
)
def test_prompts_get_the_time_that_running_answers_leave_and_a_third_at_least(
    target_s: float | None, num_decodes: int, num_tokens: int
) -> None:
    step = known_pace(target_s).plan(256, [sequence() for _ in range(num_decodes)])
    assert len(step.answers) == num_decodes
    assert prompt_tokens(step) == pytest.approx(num_tokens, abs=1)


def test_tokens_whose_logits_are_wanted_cost_more_and_the_time_is_shared() -> None:
    step = known_pace(None).plan(256, [sequence() for _ in range(20)])
    with_logits = sequence(return_context_logits=True)
    assert prompt_tokens(step, with_logits) == pytest.approx(30, abs=1)
    step.take_time(with_logits, 15)
    assert prompt_tokens(step) == pytest.approx(45, abs=1)
    step.take_time(sequence(), 45)
    assert prompt_tokens(step) == 0
    assert not step.has_time


def test_the_first_prompt_of_a_step_computes_a_token_whatever_it_costs() -> None:
    paced = known_pace(0.001)
    paced.times.token_s = 1e3
    step = paced.plan(256, [sequence()])
    assert prompt_tokens(step) == 1
    step.take_time(sequence(), 1)
    assert prompt_tokens(step) == 0


def test_answers_of_clients_within_their_shares_all_get_a_token() -> None:
    decoding = [sequence(client) for client in ["a", "b"] * 30]
    assert known_pace(0.001).plan(256, decoding, is_shared=True).answers == decoding


def test_a_client_over_its_share_takes_turns_so_that_the_others_need_not_wait_for_all_of_it() -> None:
    paced = known_pace(None)
    victim, attackers = sequence("victim"), [sequence("attacker") for _ in range(63)]
    decoding = [*attackers[:30], victim, *attackers[30:]]
    turns = dict.fromkeys(attackers, 0)
    number = 0
    for _ in range(63):
        step = paced.plan(256, decoding, set(attackers), is_shared=True)
        assert victim in step.answers
        assert step.answers == [one for one in decoding if one in set(step.answers)], "another order"
        # 20.5 ms are the victim's own, and half of the other 20.5 are left to the others.
        assert len(step.turns) == pytest.approx(20, abs=1)
        assert set(step.answers) == {victim, *step.turns}
        for one in step.turns:
            turns[one] += 1
            one.last_turn = number = number + 1
    assert max(turns.values()) - min(turns.values()) <= 1


def test_prompts_get_less_beside_answers_of_another_client() -> None:
    # 2 x 20.5 ms less 20.5 ms of the answer.
    assert prompt_tokens(known_pace(None).plan(256, [sequence("a")], is_shared=True), sequence("b")) == 41
    exact = known_pace(0.060).plan(256, [sequence("a")], is_shared=True)
    assert prompt_tokens(exact, sequence("b")) == pytest.approx(79, abs=1)


def test_prompts_of_a_burst_count_as_answers_unless_other_clients_have_work() -> None:
    # 2 x 28 ms, which sixteen answers will take, less the 20.5 ms of the one that has begun.
    assert prompt_tokens(known_pace(None).plan(256, [sequence()], num_burst=15)) == pytest.approx(71, abs=1)
    assert prompt_tokens(known_pace(None).plan(256, [sequence()], is_shared=True, num_burst=15)) == 41
    assert prompt_tokens(known_pace(0.060).plan(256, [sequence()], num_burst=15)) == pytest.approx(79, abs=1)


def test_the_target_limited_steps_and_turns_are_told() -> None:
    paced = known_pace(0.0515)
    assert paced.stats == PaceStats()
    for num_tokens in (10, 63):
        step = paced.plan(256, [sequence()])
        num_tokens = min(num_tokens, step.room_for(sequence()))
        step.take_time(sequence(), num_tokens)
        step.add(sequence(), num_tokens)
        paced.finish(step)
    attackers = [sequence("attacker") for _ in range(3)]
    paced.plan(256, [sequence("victim"), *attackers], set(attackers), is_shared=True)
    assert paced.stats == PaceStats(pytest.approx(0.0515), num_limited_steps=1, num_turns=1)


def test_the_time_since_the_last_step_is_taken_from_prompts_and_from_clients_over_their_shares() -> None:
    paced = known_pace(None)
    paced.interrupt(0.010)
    assert prompt_tokens(paced.plan(256, [sequence()])) == pytest.approx(41, abs=1)
    attackers = [sequence("attacker") for _ in range(63)]
    step = paced.plan(256, [sequence("victim"), *attackers], set(attackers), is_shared=True)
    assert len(step.turns) == pytest.approx(10, abs=1)
    paced.interrupt(10.0)
    assert prompt_tokens(paced.plan(256, [sequence()])) == pytest.approx(20, abs=1)


def test_the_work_of_a_step_is_that_of_answers_and_that_of_prompts_and_turns() -> None:
    paced = known_pace(None)
    victim, attackers = sequence("victim"), [sequence("attacker") for _ in range(3)]
    paced.plan(256, [victim, *attackers], set(attackers), is_shared=True)
    assert paced.launch([scheduled(1, one) for one in (victim, *attackers)]) == StepWork(1, 3)
    paced.plan(256, [victim])
    prompts = [scheduled(40), scheduled(5, sequence(return_context_logits=True))]
    assert paced.launch([scheduled(1, victim), *prompts]) == StepWork(1, 40 + 3 * 5)


def test_one_in_sixteen_steps_has_answers_alone_so_that_their_time_stays_known() -> None:
    paced = known_pace(None)
    victim, attackers = sequence("victim"), [sequence("attacker") for _ in range(3)]
    measured = []
    for _ in range(64):
        step = paced.plan(256, [victim, *attackers], set(attackers), is_shared=True)
        measured.append(step.answers == [victim] and not step.has_time)
        prompts = [scheduled(min(8, step.room_for(sequence())))] if step.has_time else []
        paced.launch([scheduled(1, one) for one in step.answers] + prompts)
    assert measured == ([False] * 15 + [True]) * 4


class Machine:
    """Steps of an engine whose times only the test knows: 20 ms, 1 ms an answer, and so much a token of a prompt."""

    def __init__(self, target_s: float | None = None, seed: int = 0) -> None:
        self.pace = Pace(target_s)
        self.random = Random(seed)
        self.noise = 0.0
        self.factor = 1.0
        self.prompt_token_s = 0.5e-3
        self.row_s = 1e-3

    def own_s(self, num_answers: int) -> float:
        return self.factor * (20e-3 + 1e-3 * num_answers)

    def step(self, num_answers: int, num_prompt_tokens: int, attackers: int = 0) -> float:
        """A step of a client's answers, with as many of these tokens of a prompt as it may have, and with answers of
        another client, each as dear as `row_s`. Its seconds."""
        own = [sequence("victim") for _ in range(num_answers)]
        others = [sequence("attacker") for _ in range(attackers)]
        step = self.pace.plan(256, [*own, *others], set(others), is_shared=attackers > 0)
        num_tokens = min(step.room_for(sequence()), num_prompt_tokens)
        step.take_time(sequence(), num_tokens)
        work = [scheduled(1, one) for one in step.answers]
        work += [scheduled(num_tokens)] if num_tokens > 1 else []
        if not work:
            return 0.0
        seconds = self.own_s(num_answers) + self.factor * num_tokens * self.prompt_token_s
        seconds += self.factor * self.row_s * (len(step.answers) - num_answers)
        seconds *= self.random.uniform(1, 1 + self.noise)
        self.pace.times.observe(self.pace.launch(work), seconds)
        return seconds

    def steps(self, number: int, *args: int) -> list[float]:
        return [self.step(*args) for _ in range(number)]


def test_before_answers_alone_were_measured_a_step_has_nothing_else() -> None:
    machine = Machine()
    assert machine.step(0, 300) == pytest.approx(0.148), "nobody waits"
    assert machine.step(1, 300) == pytest.approx(0.021)
    assert machine.step(1, 300) > 0.030


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("num_answers", [1, 16])
def test_steps_with_prompts_without_end_keep_to_the_target(noise: float, num_answers: int) -> None:
    machine = Machine()
    machine.noise = noise
    machine.steps(30, num_answers, 0)
    times = machine.steps(400, num_answers, 300)[10:]
    target_s = 2.5 * machine.own_s(num_answers)
    assert max(times) < (1.1 + 1.5 * noise) * target_s
    assert sum(times) / len(times) > 0.85 * target_s, "prompts get less than they may"


def test_a_machine_that_becomes_slower_or_faster_while_there_are_prompts_is_known_to_be() -> None:
    machine = Machine()
    machine.steps(50, 2, 300)
    for factor in (4.0, 0.5):
        machine.factor = factor
        machine.steps(160, 2, 300)
        for seconds in machine.steps(15, 2, 300):
            assert seconds == pytest.approx(machine.own_s(2), rel=0.01) or (
                1.8 * machine.own_s(2) < seconds < 3 * machine.own_s(2)
            )


def test_dear_answers_of_another_client_do_not_lengthen_the_target() -> None:
    """A row of theirs takes five times as long, and they have prompts, too: the victim waits for twice its own time."""
    machine = Machine()
    machine.row_s = 5e-3
    machine.steps(20, 1, 0)
    times = sorted(machine.steps(600, 1, 300, 4)[50:])
    assert times[-len(times) // 100] < 2.3 * machine.own_s(1)


def test_the_time_of_few_answers_is_soon_known_after_that_of_many() -> None:
    machine = Machine()
    machine.steps(50, 64, 0)
    times = machine.steps(200, 1, 300)
    assert max(times[70:]) < 1.15 * 2.5 * machine.own_s(1)


def test_a_price_that_rises_with_the_context_makes_chunks_smaller() -> None:
    machine = Machine()
    machine.steps(20, 1, 0)
    machine.steps(20, 1, 300)
    for _ in range(20):
        machine.prompt_token_s *= 1.2
        times = machine.steps(10, 1, 300)
        assert max(times) < 1.2 * 2.5 * machine.own_s(1)


def test_the_slow_first_steps_of_a_machine_are_soon_forgotten() -> None:
    times = StepTimes()
    for seconds in (1.3, 0.85):
        times.observe(StepWork(0, 6), seconds)
        times.observe(StepWork(1, 0), seconds)
    for _ in range(6):
        times.observe(StepWork(1, 0), 0.02)
    assert times.own_s(1) == pytest.approx(0.02, rel=0.1)
    num_steps = 0
    while times.token_s > 1e-3:
        num_tokens = max(1, int(0.03 / times.token_s))
        times.observe(StepWork(1, num_tokens), 0.02 + 0.5e-3 * num_tokens)
        num_steps += 1
    assert num_steps < 80


def test_one_step_that_took_long_by_chance_changes_little() -> None:
    machine = Machine()
    machine.steps(100, 4, 300)
    for work in (StepWork(4, 0), StepWork(4, 60), StepWork(4, 3)):
        own_s, token_s = machine.pace.times.own_s(4), machine.pace.times.token_s
        machine.pace.times.observe(work, 10.0)
        assert machine.pace.times.own_s(4) < 1.35 * own_s
        assert machine.pace.times.token_s < 2 * token_s
        machine.steps(100, 4, 300)


WORK = st.tuples(st.integers(0, 64), st.integers(0, 256)).filter(any)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(WORK, st.floats(0, 10)), max_size=30), st.integers(0, 64), st.integers(0, 64))
def test_whatever_is_measured_times_are_no_less_than_nothing_and_more_answers_take_no_less(
    steps: list[tuple[tuple[int, int], float]], few: int, many: int
) -> None:
    times = StepTimes()
    for work, seconds in steps:
        times.observe(StepWork(*work), seconds)
        assert times.token_s >= 0
        few, many = sorted((few, many))
        assert 0 <= times.own_s(few) <= times.own_s(many)


def test_a_step_lasts_until_its_outputs_have_left_and_the_rest_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = ToldPace()

    def step(read_s: float, sent_s: float | None, next_s: float) -> None:
        started_s = pace.begin()
        now[0] = read_s
        pace.note_read(started_s, StepWork(1, 0))
        if sent_s is not None:
            now[0] = sent_s
            pace.note_sent()
        now[0] = next_s

    step(102.0, 103.0, 107.0)
    step(108.0, None, 110.0)  # of a caller that sends nothing
    pace.begin()
    pace.note_sent()  # there was no step
    pace.begin()
    assert pace.times.told == [(3.0, StepWork(1, 0)), (1.0, StepWork(1, 0))]
    assert pace.interruptions[1:] == [4.0, 2.0, 2.0]


def test_a_step_that_was_launched_before_the_last_one_was_read_begins_when_the_outputs_of_that_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = ToldPace()
    started = [pace.begin()]
    for now[0] in (1.0, 5.0):
        started.append(pace.begin())
        now[0] += 3.0
        pace.note_read(started.pop(0), StepWork(1, 0))
        now[0] += 0.5
        pace.note_sent()
    pace.begin()
    assert [seconds for seconds, _ in pace.times.told] == [4.5, 4.0]


class ToldTimes(StepTimes):
    """Keeps all that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float, StepWork]] = []

    def observe(self, work: StepWork, seconds: float) -> None:
        self.told.append((seconds, work))
        super().observe(work, seconds)


class ToldPace(Pace):
    """Keeps all that it is told."""

    times: ToldTimes

    def __init__(self) -> None:
        super().__init__(None)
        self.times = ToldTimes()
        self.interruptions: list[float] = []

    def interrupt(self, seconds: float) -> None:
        self.interruptions.append(seconds)


def test_an_engine_tells_the_work_of_its_steps(tmp_path: Path, default_model_dir: Path) -> None:
    config = EngineConfig.model_validate(
        {
            "model_path": save_tiny_llama(tmp_path),
            "tokenizer_path": default_model_dir,
            "num_threads": 1,
            "kv_cache_memory_bytes": 8 << 20,
        }
    )
    engine = Engine(config)
    try:
        times = engine._pace.times = ToldTimes()
        engine.add_request(GenerationRequest("a", [5] * 40, SamplingParams(max_tokens=3, end_id=-1)))
        while engine.has_work:
            engine.step()
            engine.note_sent()
        engine.step()
        assert [work for _, work in times.told] == [StepWork(0, 40), StepWork(1, 0), StepWork(1, 0)]
        assert all(seconds > 0 for seconds, _ in times.told)
    finally:
        engine.close()
