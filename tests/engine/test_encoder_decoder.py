"""Engines with an encoder against transformers and PEFT: greedy tokens and beams, in any batch and little memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from support.encoder_decoders import VOCAB_SIZE, make_model, random_tokens
from support.engines import Answer, LogitsRecorder, poison_claimed_blocks, run_all
from support.oracle import Oracle, packed

from multilora_engine.config import EngineConfig
from multilora_engine.engine import base_model
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import ConfigError, InvalidRequest, RequestError
from multilora_engine.lora.layout import AdapterTraits
from multilora_engine.models.registry import read_model_config
from multilora_engine.request import GenerationRequest, SamplingParams, Sender
from multilora_engine.sequences.prompt_log_probs import row_type

TOLERANCE = 1e-3
ENDS = [*range(20, 50)]
"""So many end tokens that beams of a random model end early."""
START = {"t5 v1.1": 0, "bart": 2}
TOKEN_BYTES = {"t5 v1.1": 3 * 2 * 5 * 12 * 4, "bart": 3 * 2 * 48 * 4}
"""Keys and values of a token in the decoder's layers."""
TARGETS = {
    "t5 v1.1": (["q", "v"], ["k", "o", "wi_0", "wi_1", "wo"]),
    "bart": (["q_proj", "v_proj"], ["k_proj", "out_proj", "fc1", "fc2"]),
}
"""Of each family PEFT's defaults, and all other linears."""


@dataclass
class Family:
    """A model of transformers with adapters, its checkpoint, the token that begins an answer, and `TOKEN_BYTES`."""

    oracle: Oracle
    checkpoint: Path
    start: int
    token_bytes: int

    def engine(self, tokenizer: Path, **options: Any) -> Engine:
        config = EngineConfig(
            model_path=self.checkpoint,
            tokenizer_path=tokenizer,
            num_threads=1,
            **{"kv_cache_memory_bytes": 1 << 20, "max_num_encoder_tokens": 50, "block_size": 4, **options},
        )
        engine = Engine(config)
        for task_id, directory in enumerate(self.oracle.adapters.values()):
            engine.put_adapter(task_id, packed(directory, engine.info.adapter_layout, self.checkpoint))
        poison_claimed_blocks(engine)
        return engine

    def name_of(self, request: GenerationRequest) -> str | None:
        return None if request.lora_task_id is None else [*self.oracle.adapters][request.lora_task_id]

    @torch.inference_mode()
    def logits(self, request: GenerationRequest, answer: list[int]) -> torch.Tensor:
        """The logits after each token of the decoder's beginning and of an answer but its last, float32 [n, vocab]."""
        decoder = torch.tensor([request.prompt_token_ids + answer[:-1]])
        with self.oracle._only(self.name_of(request)) as model:
            source = torch.tensor([request.source_token_ids])
            logits: torch.Tensor = model(input_ids=source, decoder_input_ids=decoder).logits[0]
        return logits

    def beams(self, request: GenerationRequest) -> list[tuple[list[int], float]]:
        """Tokens and scores of the beams that transformers finds, best first."""
        sampling, source = request.sampling, torch.tensor([request.source_token_ids])
        with self.oracle._only(self.name_of(request)) as model:
            found = model.generate(  # type: ignore[operator]
                input_ids=source,
                attention_mask=torch.ones_like(source),
                decoder_input_ids=torch.tensor([request.prompt_token_ids]),
                do_sample=False,
                num_beams=sampling.beam_width,
                num_return_sequences=sampling.beam_width,
                max_new_tokens=sampling.max_tokens,
                length_penalty=sampling.length_penalty,
                early_stopping=True,
                use_cache=False,  # transformers makes a cache of as many layers as the encoder has.
                eos_token_id=ENDS,
                pad_token_id=0,
                forced_bos_token_id=sampling.forced_first_id,
                forced_eos_token_id=sampling.forced_last_id,
                return_dict_in_generate=True,
                output_scores=True,
            )
        answers = found.sequences[:, len(request.prompt_token_ids) :].tolist()
        ends = [next((i for i, token in enumerate(answer) if token in ENDS), len(answer)) for answer in answers]
        cut = [answer[: end + 1] for answer, end in zip(answers, ends, strict=True)]
        return list(zip(cut, found.sequences_scores.tolist(), strict=True))


@pytest.fixture(scope="module", params=["t5 v1.1", "bart"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("family")
    model = make_model(request.param)
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder / "checkpoint")
    config = json.loads((folder / "checkpoint" / "config.json").read_text())
    (folder / "checkpoint" / "config.json").write_text(json.dumps(config | {"eos_token_id": ENDS}))
    oracle = Oracle(model, folder)
    defaults, others = TARGETS[request.param]
    oracle.add("defaults", LoraConfig(r=4, lora_alpha=80, target_modules=defaults), seed=1)
    oracle.add("all", LoraConfig(r=8, lora_alpha=96, target_modules=[*defaults, *others], use_dora=True), seed=2)
    oracle.add("others", LoraConfig(r=3, lora_alpha=60, target_modules=others, use_rslora=True), seed=3)
    return Family(oracle, folder / "checkpoint", START[request.param], TOKEN_BYTES[request.param])


@pytest.fixture(scope="module")
def engine(family: Family, default_model_dir: Path) -> Engine:
    return family.engine(default_model_dir)


def translation(
    family: Family, name: str, source: list[int], task: int | None = None, more: int = 0, **sampling: Any
) -> GenerationRequest:
    """more: tokens of the decoder's beginning after its start."""
    prompt = [family.start, *random_tokens(more, seed=more)]
    parameters = SamplingParams(**{"max_tokens": 12, "end_id": -1, **sampling})
    return GenerationRequest(name, prompt, parameters, lora_task_id=task, source_token_ids=source)


def translations(family: Family, **sampling: Any) -> list[GenerationRequest]:
    """Sources of many lengths, some of them equal, with every adapter and none, and beginnings of 1 and 4 tokens."""
    rows = zip([1, 7, 16, 17, 40, 5, 3, 16, 23, 12, 16, 31], cycle([None, 0, 1, 2]), cycle([0, 3, 0, 0, 3]))
    return [
        translation(family, f"r{i}", random_tokens(length, seed=length), task, more, **sampling)
        for i, (length, task, more) in enumerate(rows)
    ]


def assert_greedy(family: Family, requests: list[GenerationRequest], answers: dict[str, Answer]) -> None:
    for request in requests:
        answer = answers[request.request_id]
        assert len(answer.token_ids) == request.sampling.max_tokens
        expected = family.logits(request, answer.token_ids)[len(request.prompt_token_ids) - 1 :]
        assert answer.token_ids == expected.argmax(dim=-1).tolist(), f"{request.request_id} {request.lora_task_id}"
        assert answer.final is not None
        assert answer.final.num_prompt_tokens == len(request.source_token_ids)


def told(answer: Answer) -> tuple[Any, ...]:
    return answer.token_ids, answer.log_probs


def test_a_mixed_batch_answers_as_peft_does_and_each_request_has_the_same_bits_alone(
    family: Family, engine: Engine, default_model_dir: Path
) -> None:
    requests = translations(family, return_log_probs=True)
    rows = LogitsRecorder(engine).rows
    answers = run_all(engine, requests)
    assert_greedy(family, requests, answers)
    for request in requests:
        answer = answers[request.request_id]
        expected = family.logits(request, answer.token_ids)[len(request.prompt_token_ids) - 1 :]
        torch.testing.assert_close(torch.stack(rows[request.request_id]), expected, atol=TOLERANCE, rtol=1e-4)
        base = family.logits(msgspec.structs.replace(request, lora_task_id=None), answer.token_ids)
        is_changed = (base[len(request.prompt_token_ids) - 1 :] - expected).abs().max() > 50 * TOLERANCE
        assert is_changed == (request.lora_task_id is not None)
    fresh = family.engine(default_model_dir, enable_prefix_caching=False)
    assert all(told(run_all(fresh, [r])[r.request_id]) == told(answers[r.request_id]) for r in requests)


def test_sources_are_encoded_again_after_a_preemption(family: Family, default_model_dir: Path) -> None:
    requests = translations(family, max_tokens=16)[:8]
    sizes = {"max_model_len": 20, "kv_cache_memory_bytes": 80 * family.token_bytes}
    small_steps = {"enable_prefix_caching": False, "max_num_batched_tokens": 8, "max_num_seqs": 5}
    for options in (small_steps, {"enable_async_scheduling": True}):
        tight = family.engine(default_model_dir, **sizes, **options)
        assert_greedy(family, requests, run_all(tight, requests))
        assert tight.stats.num_preemptions > 0


def test_equal_sources_of_a_tenant_and_an_adapter_are_encoded_once_and_answers_have_the_same_bits(
    family: Family, default_model_dir: Path
) -> None:
    engine, source = family.engine(default_model_dir), random_tokens(18, seed=1)
    acme = Sender(tenant="acme", name="acme")
    for task in (None, 0):
        first = translation(family, "r", source, task, return_log_probs=True)
        expected = run_all(engine, [first])["r"]
        assert expected.final is not None
        for request, num_cached in [
            (first, 18),
            (msgspec.structs.replace(first, sender=acme), 0),
            (msgspec.structs.replace(first, sender=acme), 18),
            (msgspec.structs.replace(first, source_token_ids=source[:-1]), 0),
            (translation(family, "r", source, task, more=3), 18),
            (translation(family, "r", source, task, more=3, return_context_logits=True), 18),
        ]:
            answer = run_all(engine, [request])["r"]
            assert answer.final is not None
            assert answer.final.num_cached_tokens == num_cached
            assert answer.final.perf is not None
            assert answer.final.perf.kv_cache_reused_blocks >= -(-num_cached // 4)
            if request.source_token_ids == source and request.sampling == first.sampling:
                assert told(answer) == told(expected)
            else:
                assert_greedy(family, [request], {"r": answer})


def test_beams_share_a_source_and_are_those_of_transformers(
    family: Family, engine: Engine, default_model_dir: Path
) -> None:
    ends_by_force = {"forced_last_id": ENDS[-1]}
    forced_or_not: list[dict[str, int]] = [*[{}, {"forced_first_id": 60}] * 3, {}, ends_by_force, ends_by_force]
    options = {"end_id": None, "length_penalty": 1.0, "max_tokens": 10}
    searches = [
        translation(family, f"s{i}", random_tokens(length, seed=length), task, 0, beam_width=width, **options, **forced)
        for i, (length, task, width, forced) in enumerate(
            zip([9, 22, 17, 30, 9, 9, 30, 9, 17], cycle([None, 0, 1, 2]), [2, 4, 3, 5, 4, 5, 3, 4, 5], forced_or_not)
        )
    ]
    expected = {search.request_id: family.beams(search) for search in searches}
    lone = translation(family, "lone", random_tokens(9, seed=9), 0)
    tight = family.engine(default_model_dir, max_model_len=16, kv_cache_memory_bytes=92 * family.token_bytes)
    for one in (engine, tight):
        answers = run_all(one, [*searches, lone])
        assert_greedy(family, [lone], answers)
        for search in searches:
            final = answers[search.request_id].final
            assert final is not None
            assert [beam.token_ids for beam in final.beams] == [tokens for tokens, _ in expected[search.request_id]]
            for beam, (tokens, score) in zip(final.beams, expected[search.request_id], strict=True):
                assert beam.cum_log_prob / len(tokens) == pytest.approx(score, abs=TOLERANCE)
    assert tight.stats.num_preemptions > 0


def test_a_forced_token_is_the_first_of_the_answer_and_counts_as_one(family: Family, engine: Engine) -> None:
    source = random_tokens(9, seed=2)
    forced = translation(family, "forced", source, 0, max_tokens=6, forced_first_id=77, min_tokens=2)
    begun = msgspec.structs.replace(
        translation(family, "begun", source, 0, max_tokens=5), prompt_token_ids=[family.start, 77]
    )
    answers = run_all(engine, [forced, begun])
    assert answers["forced"].token_ids == [77, *answers["begun"].token_ids]


def test_a_forced_end_token_takes_the_last_place_only(family: Family, engine: Engine, default_model_dir: Path) -> None:
    """As in transformers' `generate`. The answer was cut off, which its reason tells."""
    source, last = random_tokens(9, seed=2), ENDS[-1]
    options: dict[str, Any] = {"min_tokens": 6, "bad_token_sequences": ((last,),), "end_id": None}
    free = translation(family, "free", source, 0, max_tokens=6, **options)
    forced = msgspec.structs.replace(free, request_id="forced")
    forced = msgspec.structs.replace(forced, sampling=msgspec.structs.replace(free.sampling, forced_last_id=last))
    both = translation(family, "both", source, 0, max_tokens=1, forced_first_id=77, forced_last_id=last)
    endless = translation(family, "endless", source, 0, max_tokens=3)
    unended = translation(family, "unended", source, 0, max_tokens=3, forced_last_id=last)
    for one in (engine, family.engine(default_model_dir, enable_async_scheduling=True)):
        answers = run_all(one, [free, forced, both, endless, unended])
        assert answers["forced"].token_ids == [*answers["free"].token_ids[:-1], last]
        assert answers["both"].token_ids == [last]
        assert answers["unended"].token_ids == [*answers["endless"].token_ids[:2], last]
        assert {answer.final.finish_reason for answer in answers.values() if answer.final} == {"length"}


def test_logits_and_log_probs_of_the_prompt_are_of_the_decoders_beginning(family: Family, engine: Engine) -> None:
    request = translation(
        family, "r", random_tokens(20, seed=3), 1, more=5, return_prompt_log_probs=True, num_prompt_top_log_probs=2
    )
    run_all(engine, [msgspec.structs.replace(request, sampling=SamplingParams(1))])
    answer = run_all(engine, [request])["r"]
    rows = np.frombuffer(answer.prompt_log_probs, row_type(2))
    expected = family.logits(request, answer.token_ids).log_softmax(dim=-1)[:5]
    chosen = expected.gather(1, torch.tensor(request.prompt_token_ids[1:])[:, None]).squeeze(1)
    np.testing.assert_allclose(rows["log_prob"][1:], chosen, rtol=0, atol=TOLERANCE)


def test_an_abort_a_deadline_and_a_stop_give_both_tables_back(family: Family, engine: Engine) -> None:
    source = random_tokens(20, seed=4)
    requests = [
        translation(family, "aborted", source),
        translation(family, "late", source, beam_width=3),
        translation(family, "stopped", source, stop_token_sequences=tuple((token,) for token in range(VOCAB_SIZE))),
        translation(family, "kept", source),
    ]
    engine.add_request(msgspec.structs.replace(requests[1], timeout_s=0.0))
    for request in (requests[0], *requests[2:]):
        engine.add_request(request)
    answers = {request.request_id: Answer() for request in requests}
    is_aborted = False
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].add(output)
        if not is_aborted and (output_ := engine.abort("aborted")) is not None:
            answers["aborted"].add(output_)
            is_aborted = True
        engine.check_integrity()
    assert engine.stats.num_free_blocks == engine.stats.num_blocks
    assert len(answers["kept"].token_ids) == 12
    assert answers["stopped"].final is not None
    assert answers["stopped"].final.num_output_tokens == 1
    assert answers["late"].final is not None
    assert answers["late"].final.error_code == "CANCELLED"


def test_a_step_without_memory_fails_its_requests_and_the_source_is_encoded_later(
    family: Family, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*_: object) -> None:
        raise torch.OutOfMemoryError("3 GiB wanted")

    request = translation(family, "r", random_tokens(21, seed=5))
    engine.add_request(request)
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "launch", launch)
        assert [output.error_code for output in engine.step()] == ["INTERNAL"]
    engine.check_integrity()
    answers = run_all(engine, [request])
    assert_greedy(family, [request], answers)
    assert answers["r"].final is not None
    assert answers["r"].final.num_cached_tokens == 0


TOKENS = st.integers(0, VOCAB_SIZE - 1) | st.sampled_from([-1, VOCAB_SIZE])
TEXT = st.lists(TOKENS, max_size=6) | st.sampled_from([49, 50, 51, 60, 513]).map(lambda n: [7] * n)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.sampled_from([0, 1, 5, 600]),
    "beam_width": st.sampled_from([1, 1, 3, 9]),
    "forced_first_id": st.none() | TOKENS,
    "forced_last_id": st.none() | TOKENS,
    "min_tokens": st.integers(0, 3),
    "end_id": st.none() | TOKENS,
    "return_context_logits": st.booleans(),
    "return_log_probs": st.booleans(),
    "bad_token_sequences": st.sampled_from([(), ((7,),), ((0, 7), (2, 7))]),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(
        st.tuples(TEXT, TEXT, st.none() | st.integers(0, 2), st.fixed_dictionaries(OPTIONS)), min_size=1, max_size=3
    )
)
def test_any_request_is_answered_or_refused_and_its_neighbour_has_the_same_bits(
    family: Family, engine: Engine, asked: list[tuple[list[int], list[int], int | None, dict[str, Any]]]
) -> None:
    neighbour = translation(family, "neighbour", random_tokens(9, seed=8), 1, return_log_probs=True)
    alone = told(run_all(engine, [neighbour])["neighbour"])
    accepted = [neighbour]
    for i, (source, prompt, task, options) in enumerate(asked):
        request = GenerationRequest(
            f"r{i}", prompt, SamplingParams(**options), lora_task_id=task, source_token_ids=source
        )
        try:
            engine._admission._new_sequences.limits.check(request)
        except RequestError as error:
            assert error.code in ("INVALID_ARG", "UNSUPPORTED")  # noqa: PT017
            assert len(str(error)) < 300  # noqa: PT017
        else:
            accepted.append(request)
    answers = run_all(engine, accepted)
    assert told(answers["neighbour"]) == alone
    for request in accepted:
        final = answers[request.request_id].final
        assert final is not None
        assert final.error_code in (None, "INVALID_ARG")
        if final.error_code is None:
            assert final.num_prompt_tokens == len(request.source_token_ids)
            first = [beam.token_ids[0] for beam in final.beams] or answers[request.request_id].token_ids[:1]
            forced = {request.sampling.forced_first_id, request.sampling.forced_last_id} - {None}
            assert request.sampling.forced_first_id is None or set(first) <= forced


def test_what_no_encoder_decoder_has_is_refused_by_name(family: Family, engine: Engine) -> None:
    fine = translation(family, "r", [1, 2, 3])
    assert engine.info.source is not None
    assert engine.info.source.max_tokens == 50
    for options, message in (
        ({"source_token_ids": []}, "the source is empty"),
        ({"source_token_ids": [1] * 51}, "the source has 51 tokens and max_num_encoder_tokens is 50"),
        ({"lora_start": 0, "lora_task_id": 0}, "lora_start is 0, and an adapter of an encoder-decoder"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.add_request(msgspec.structs.replace(fine, **options))
    plain = packed(family.oracle.adapters["defaults"], engine.info.adapter_layout)
    for traits, message in (
        (AdapterTraits(invocation_tokens=(1, 2)), "the adapter has alora_invocation_tokens, which an encoder-decoder"),
        (
            AdapterTraits(rope='{"context_length": 64}'),
            "the adapter has rotary embeddings of its own, which an encoder",
        ),
    ):
        adapter = type(plain)(traits.digest(plain.digest), plain.rows, plain.pages, traits)
        with pytest.raises(InvalidRequest, match=message):
            engine.put_adapter(9, adapter)


def test_no_sequence_is_longer_than_a_table_of_positions(family: Family, default_model_dir: Path) -> None:
    """BART's ends at 64; T5 has none, so that any length is served."""
    longest = 100 if family.start == START["t5 v1.1"] else 64
    if longest == 64:
        with pytest.raises(ConfigError, match="max_model_len is 65, and the model has 64 positions"):
            family.engine(default_model_dir, max_model_len=65)
    engine = family.engine(default_model_dir, max_model_len=longest)
    request = translation(family, "r", random_tokens(9, seed=9), 0, max_tokens=longest - 1)
    assert_greedy(family, [request], run_all(engine, [request]))


def test_cuda_graphs_are_refused_by_name(family: Family, default_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="enable_cuda_graphs=true: the CPU serves"):
        family.engine(default_model_dir, enable_cuda_graphs=True)
    config = EngineConfig(model_path=family.checkpoint, enable_cuda_graphs=True)
    with pytest.raises(ConfigError, match="enable_cuda_graphs=true: the steps of a model with an encoder are not"):
        base_model._check_graphs(config, read_model_config(family.checkpoint))


def test_the_plan_tells_what_a_source_takes(
    family: Family, default_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    family.engine(default_model_dir)
    lines = [record.getMessage() for record in caplog.records if "a source takes" in record.getMessage()]
    assert lines == [
        f"a source takes {family.token_bytes} bytes of the KV cache for each of its tokens, once; the longest, of 50 "
        f"tokens, {50 * family.token_bytes / (1 << 20):.2f} MiB"
    ]
