"""The times that `StepClock` tells a pace: by a clock that stands still between two calls, and of an engine's own
steps.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import cast

import pytest
from support.fronts import generation_request

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.engine.pace import Pace
from multilora_engine.engine.step_clock import StepClock
from multilora_engine.engine.step_cost import StepWork
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sequences.scheduled_sequence import ScheduledSequence
from multilora_engine.sequences.sequence import Sequence
from multilora_engine.text.text_stream import TextStream


class ToldPace(Pace):
    """Keeps all that it is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.told: list[tuple[float, StepWork | None]] = []
        self.interruptions: list[float] = []

    def observe(self, seconds: float, work: StepWork | None) -> None:
        self.told.append((seconds, work))

    def interrupt(self, seconds: float) -> None:
        self.interruptions.append(seconds)


def scheduled(start: int, num_tokens: int) -> ScheduledSequence:
    sequence = Sequence(generation_request("r", [1] * 9), 0, None, cast(TextStream, None), Random(0), 1)
    return ScheduledSequence(sequence, start, num_tokens, is_sampled=False)


def test_a_step_lasts_until_its_outputs_have_left_and_the_rest_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = ToldPace()
    clock = StepClock(pace)

    def step(read_s: float, sent_s: float | None, next_s: float) -> None:
        started_s, work = clock.begin(), StepWork(1)
        now[0] = read_s
        clock.note_read(started_s, work)
        if sent_s is not None:
            now[0] = sent_s
            clock.note_sent()
        now[0] = next_s

    step(102.0, 103.0, 107.0)
    step(108.0, None, 110.0)  # of a caller that sends nothing
    clock.begin()
    clock.note_sent()  # there was no step
    clock.begin()
    assert pace.told == [(3.0, StepWork(1)), (1.0, StepWork(1))]
    assert pace.interruptions[1:] == [4.0, 2.0, 2.0]


def test_a_step_that_was_launched_before_the_last_one_was_read_begins_when_the_outputs_of_that_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = ToldPace()
    clock = StepClock(pace)
    started = [clock.begin()]
    for now[0] in (1.0, 5.0):
        started.append(clock.begin())
        now[0] += 3.0
        clock.note_read(started.pop(0), None)
        now[0] += 0.5
        clock.note_sent()
    clock.begin()
    assert [seconds for seconds, _ in pace.told] == [4.5, 4.0]


def test_the_work_of_steps_with_prompts_is_told_and_of_few_others() -> None:
    clock = StepClock(ToldPace())
    decodes = [clock.work_to_measure([scheduled(9, 1)]) for _ in range(80)]
    assert [work for work in decodes if work] == [StepWork(1, num_decode_keys=10)] * 10
    assert clock.work_to_measure([scheduled(9, 1), scheduled(2, 3)]) == StepWork(
        1, has_prompts=1, num_prompt_tokens=3, num_decode_keys=10, num_prompt_keys=3 + 4 + 5
    )


@pytest.mark.parametrize("wanted", ["return_context_logits", "return_prompt_log_probs"])
def test_an_engine_charges_the_rows_that_its_steps_told_of_prompts(
    tmp_path: Path, default_model_dir: Path, wanted: str
) -> None:
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
        for name, sampling in (("plain", {}), ("rows", {wanted: True})):
            engine.add_request(GenerationRequest(name, [5] * 40, SamplingParams(max_tokens=2, end_id=-1, **sampling)))
            while engine.has_work:
                engine.step()
                engine.note_sent()
            engine.step()
            assert engine._pace.cost.knows_rows == bool(sampling)
    finally:
        engine.close()
