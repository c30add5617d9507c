"""Steps that are launched before the tokens of the one before are known: the same answers, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.adapters import wire_adapter
from support.engines import Answer, assert_idle, poison_claimed_blocks, run_all

from checkpoints.tiny_llama import VOCAB_SIZE, save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.format import pack_adapter
from multilora_engine.request import GenerationRequest, Guide, SamplingParams
from multilora_engine.sequences.prompt_log_probs import row_type

BAD = tuple((first, second) for first in range(0, VOCAB_SIZE, 2) for second in range(0, VOCAB_SIZE, 9))
"""So many that answers meet some."""

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_k": 0, "seed": 3},
    {"temperature": 1.1, "top_k": 9, "top_p": 0.8, "seed": 4, "embedding_bias": ((5, 2.0),)},
    {"return_prompt_log_probs": True, "num_prompt_top_log_probs": 2},
    {"min_tokens": 3, "frequency_penalty": 0.6},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "temperature": 1.3, "top_k": 0, "seed": 5},
    {"bad_token_sequences": BAD, "temperature": 1.2, "top_k": 3, "seed": 6},
    {"top_p": 0.9, "top_p_decay": 0.6, "top_p_reset_id": 3, "top_k": 0, "temperature": 2.0, "seed": 7},
    {"return_log_probs": True, "num_top_log_probs": 2},
    {"return_generation_logits": True},
    {"forced_first_id": 7, "min_tokens": 2, "presence_penalty": 0.4, "return_log_probs": True},
    {"forced_last_id": 11, "return_log_probs": True, "temperature": 1.2, "top_k": 0, "seed": 8},
    {"beam_width": 2, "forced_first_id": 9, "forced_last_id": 11},
    {"beam_width": 2, "repetition_penalty": 1.3, "bad_token_sequences": BAD},
]
RUNNING_AHEAD = KINDS[:-2]

READ_LATER = {
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "embedding_bias", "min_tokens"),
    *("end_id", "stop_words", "stop_token_sequences", "include_stop_str_in_output", "return_prompt_log_probs"),
    *("top_p_decay", "top_p_min", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("bad_token_sequences", "return_log_probs", "return_generation_logits", "end_ids"),
    *("forced_first_id", "forced_last_id"),
}
READ_AT_ONCE: dict[str, Any] = {"guide": Guide("json"), "return_context_logits": True, "beam_width": 2}
MEAN_NOTHING_ALONE = {
    *("top_p_reset_id", "num_top_log_probs", "num_prompt_top_log_probs"),
    *("length_penalty", "early_stopping", "beam_search_diversity_rate", "guide_after_thinking"),
    "min_tokens_holds_stops",
}

Arrival = tuple[int, int, int | None, dict[str, Any], int | None]
ARRIVAL = st.tuples(
    st.integers(1, 40),
    st.integers(0, 12),
    st.none() | st.integers(0, 2),
    st.sampled_from([*RUNNING_AHEAD, *KINDS]),
    st.none() | st.integers(0, 4),
)
"""Tokens of the prompt, max_tokens, task, sampling, and which of its tokens ends the answer, if any does."""


def make_engine(folder: Path, tokenizer: Path, **options: Any) -> Engine:
    engine = Engine(EngineConfig(model_path=folder, tokenizer_path=tokenizer, num_threads=1, **options))
    layout = engine.info.adapter_layout
    for task in range(3):
        wire = wire_adapter(layout, [(1, 0, 4), (6, 1, 2 + task)], seed=task, scale=0.5)
        engine.put_adapter(task, pack_adapter(wire.weights, wire.config, layout))
    return engine


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Engine:
    return make_engine(
        save_tiny_llama(tmp_path_factory.mktemp("tiny")), default_model_dir, kv_cache_memory_bytes=1 << 20
    )


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Engine:
    """With so few blocks that sequences are preempted, and room for parts of prompts only."""
    engine = make_engine(
        save_tiny_llama(tmp_path_factory.mktemp("tiny")),
        default_model_dir,
        enable_async_scheduling=True,
        max_model_len=64,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        kv_cache_memory_bytes=40 * 1024,
    )
    poison_claimed_blocks(engine)
    return engine


def request(name: str, arrival: Arrival) -> GenerationRequest:
    num_tokens, max_tokens, task, sampling, _ = arrival
    prompt = [(3 * i) % 7 if i < 16 else (num_tokens * i) % VOCAB_SIZE for i in range(num_tokens)]
    least = 1 if "beam_width" in sampling else 0
    parameters = SamplingParams(max_tokens=max(max_tokens, least), **{"end_id": -1, **sampling})
    return GenerationRequest(name, prompt, parameters, lora_task_id=task)


def ended_by(one: GenerationRequest, end_id: int) -> GenerationRequest:
    parameters = {name: getattr(one.sampling, name) for name in SamplingParams.__slots__} | {"end_id": end_id}
    return GenerationRequest(
        one.request_id, one.prompt_token_ids, SamplingParams(**parameters), lora_task_id=one.lora_task_id
    )


def told(answer: Answer) -> Any:
    """All that a client hears of an answer, but for log-probs, which round with the chunks of the prompt."""
    assert answer.final is not None
    final = answer.final
    beams = [(beam.token_ids, beam.text, beam.finish_reason) for beam in final.beams]
    return answer.token_ids, answer.text, final.finish_reason, final.num_output_tokens, final.lora_digest, beams


def prompt_log_probs(one: GenerationRequest, answer: Answer) -> list[float]:
    rows = np.frombuffer(answer.prompt_log_probs, row_type(one.sampling.num_prompt_top_log_probs))
    assert len(rows) == (len(one.prompt_token_ids) if one.sampling.return_prompt_log_probs else 0)
    return list(map(float, rows["log_prob"]))


def test_every_parameter_is_known_to_be_read_at_once_or_later() -> None:
    assert {*READ_LATER, *READ_AT_ONCE, *MEAN_NOTHING_ALONE} == set(SamplingParams.__struct_fields__)
    for name, value in READ_AT_ONCE.items():
        assert SamplingParams(9, **{name: value}).must_read_each_token, name
    assert not any(SamplingParams(**{"max_tokens": 9, **kind}).must_read_each_token for kind in RUNNING_AHEAD)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=st.lists(st.tuples(ARRIVAL, st.integers(1, 3)), min_size=1, max_size=8), seed=st.integers(0, 1 << 30))
def test_the_answers_are_those_of_steps_that_wait_for_each_other(
    plain: Engine, ahead: Engine, arrivals: list[tuple[Arrival, int]], seed: int
) -> None:
    """Each arrival is of so many equal requests, as a client's are that wants several answers."""
    requests, alone = {}, {}
    for i, (arrival, num_sequences) in enumerate(arrivals):
        one = request("alone", arrival)
        token_ids = run_all(plain, [one])["alone"].token_ids
        end = arrival[-1]
        one = one if end is None or end >= len(token_ids) else ended_by(one, token_ids[end])
        answer = run_all(plain, [one])["alone"]
        for name in (f"r{i} {sequence}" for sequence in range(num_sequences)):
            requests[name], alone[name] = msgspec.structs.replace(one, request_id=name), answer
    expected = {name: told(answer) for name, answer in alone.items()}

    rng, waiting, answers = Random(seed), list(requests.values()), {name: Answer() for name in requests}
    aborted = set()
    while waiting or ahead.has_work:
        while waiting and rng.random() < 0.4:
            ahead.add_request(waiting.pop())
        unfinished = [name for name, answer in answers.items() if answer.final is None]
        if unfinished and rng.random() < 0.03 and (output := ahead.abort(victim := rng.choice(unfinished))) is not None:
            answers[victim].add(output)
            aborted.add(victim)
        for output in ahead.step():
            answers[output.request_id].add(output)
        ahead.check_integrity()
    assert_idle(ahead)
    for name, answer in answers.items():
        if name in aborted:
            assert answer.token_ids == expected[name][0][: len(answer.token_ids)]
        else:
            assert told(answer) == expected[name]
            assert prompt_log_probs(requests[name], answer) == pytest.approx(
                prompt_log_probs(requests[name], alone[name]), abs=1e-3
            )


def test_a_step_is_launched_before_the_one_before_is_read(ahead: Engine) -> None:
    one = request("r", (5, 6, 0, {}, None))
    ahead.add_request(one)
    assert ahead.step() == [], "the first step is in flight"
    num_tokens = [len(output.token_ids) for _ in range(6) for output in ahead.step()]
    assert sum(num_tokens) == 6
    assert not ahead.has_work, "no step was launched after the end that max_tokens sets"


def test_an_id_that_is_used_again_never_gets_a_token_of_its_former_request(plain: Engine, ahead: Engine) -> None:
    former, later = request("r", (5, 6, 0, {}, None)), request("r", (9, 6, 1, {}, None))
    ahead.add_request(former)
    ahead.step()
    assert ahead.abort("r") is not None
    ahead.add_request(later)
    answer = Answer()
    while ahead.has_work:
        for output in ahead.step():
            answer.add(output)
    assert told(answer) == told(run_all(plain, [later])["r"])


def test_running_out_of_memory_fails_the_requests_of_the_step_and_no_token_is_lost(
    plain: Engine, ahead: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*_: object) -> None:
        raise torch.OutOfMemoryError("3 GiB wanted")

    one = request("r", (5, 6, 0, {}, None))
    ahead.add_request(one)
    ahead.step()
    with monkeypatch.context() as patch:
        patch.setattr(ahead._runner, "launch", launch)
        outputs = ahead.step()
    assert [output.error_code for output in outputs] == [None, "INTERNAL"]
    assert outputs[0].token_ids == run_all(plain, [one])["r"].token_ids[:1]
    assert_idle(ahead)
    assert not ahead.has_work
