"""Every numeric option at its edges, in every mode: an answer or a typed error, and the neighbour's same bits."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.engines import Answer, assert_idle

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.engine.request_limits import RequestLimits
from multilora_engine.engine_info import SourceFacts
from multilora_engine.errors import InvalidRequest, RequestError
from multilora_engine.request import GenerationRequest, Guide, SamplingParams

INF, NAN = float("inf"), float("nan")
LARGEST = 3.4028234663852886e38
FLOATS = [0.0, 5e-324, 1e-46, 1e-45, 1.2e-38, 1e-6, 0.5, 1.0, 1.5, 2000.0, 1e30, LARGEST, 3.5e38, 1e300, INF]
INTS = [0, 1, 2, 7, 2000, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**70]

NUMERIC = {
    name: float if float in types else int
    for name, hint in typing.get_type_hints(SamplingParams).items()
    if typing.get_origin(hint) is not tuple and (types := {hint, *typing.get_args(hint)}) & {int, float}
}
OF_REQUEST: dict[str, type] = {"priority": int, "timeout_s": float, "num_tokens_ahead": int}

NUMBERS: dict[type, st.SearchStrategy[Any]] = {
    float: st.sampled_from([*FLOATS, *(-value for value in FLOATS), NAN]) | st.floats(),
    int: st.sampled_from([*INTS, *(-value for value in INTS)]) | st.integers(),
}
OPTION = st.one_of(
    *(st.tuples(st.just(name), NUMBERS[kind]) for name, kind in (NUMERIC | OF_REQUEST).items()),
    st.tuples(st.just("embedding_bias"), NUMBERS[float].map(lambda value: ((7, value), (9, -1.0)))),
)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "top_k": 0, "seed": 3},
    "decayed": {"top_k": 0, "top_p": 0.9, "top_p_decay": 0.7, "seed": 4},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.3, "temperature": 1.1, "top_k": 0, "seed": 5},
    "log-probs": {"return_log_probs": True, "num_top_log_probs": 2, "return_prompt_log_probs": True},
    "beams": {"beam_width": 3},
    "long beams": {"beam_width": 2, "early_stopping": 0, "length_penalty": 1.5, "temperature": 0.9},
    "guided": {"guide": Guide("regex", "[a-z ]{3,40}"), "temperature": 0.9, "top_k": 0, "seed": 6},
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> list[Engine]:
    checkpoint = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(
        model_path=checkpoint,
        tokenizer_path=default_model_dir,
        num_threads=1,
        max_model_len=32,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 20,  # type: ignore[arg-type]
    )
    return [Engine(config), Engine(config.model_copy(update={"enable_async_scheduling": True}))]


NEIGHBOUR = GenerationRequest("neighbour", [4, 5, 6], SamplingParams(12, end_id=-1, return_log_probs=True))


@pytest.fixture(scope="module")
def alone(engines: list[Engine]) -> list[tuple[object, ...]]:
    return [told(serve(engine, [NEIGHBOUR])["neighbour"]) for engine in engines]


def told(answer: Answer) -> tuple[object, ...]:
    assert answer.final is not None
    return answer.final.error_code, answer.token_ids, answer.log_probs


def serve(engine: Engine, requests: list[GenerationRequest]) -> dict[str, Answer]:
    """The answers of the requests that are not refused."""
    answers: dict[str, Answer] = {}
    for request in requests:
        try:
            engine.add_request(request)
        except RequestError as error:
            assert error.code != "INTERNAL"  # noqa: PT017
            assert len(str(error)) < 300  # noqa: PT017
        else:
            answers[request.request_id] = Answer()
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].add(output)
        engine.check_integrity()
    assert_idle(engine)
    return answers


def test_every_numeric_option_is_tried() -> None:
    assert {"temperature", "top_k", "seed", "length_penalty", "max_tokens", "end_id"} <= NUMERIC.keys()
    others = {name for name in SamplingParams.__struct_fields__ if name not in NUMERIC}
    assert others == {
        *("end_ids", "embedding_bias", "bad_token_sequences", "stop_words", "stop_token_sequences", "guide"),
        *(
            "min_tokens_holds_stops",
            "guide_after_thinking",
            "include_stop_str_in_output",
            "return_log_probs",
            "return_context_logits",
        ),
        *("return_generation_logits", "return_prompt_log_probs"),
    }


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mode=st.sampled_from(sorted(MODES)),
    options=st.lists(OPTION, min_size=1, max_size=3, unique_by=lambda option: option[0]).map(dict),
    num_sequences=st.integers(1, 2),
)
@example(mode="beams", options={"length_penalty": 2000.0}, num_sequences=2)
@example(mode="beams", options={"length_penalty": -LARGEST}, num_sequences=1)
@example(mode="long beams", options={"length_penalty": LARGEST}, num_sequences=1)
@example(mode="beams", options={"temperature": 1e-45}, num_sequences=1)
@example(mode="beams", options={"temperature": LARGEST, "repetition_penalty": 1e-45}, num_sequences=1)
@example(mode="beams", options={"beam_search_diversity_rate": -LARGEST}, num_sequences=1)
@example(mode="decayed", options={"top_p_decay": 2.0**1000}, num_sequences=1)
@example(mode="greedy", options={"timeout_s": NAN}, num_sequences=1)
def test_any_number_is_answered_or_refused_and_the_neighbour_has_the_same_bits(
    engines: list[Engine],
    alone: list[tuple[object, ...]],
    mode: str,
    options: dict[str, Any],
    num_sequences: int,
) -> None:
    of_request = {name: value for name, value in options.items() if name in OF_REQUEST}
    of_sampling = {name: value for name, value in options.items() if name not in OF_REQUEST}
    sampling = SamplingParams(**{"max_tokens": 6} | MODES[mode] | of_sampling)
    victims = [GenerationRequest(f"v{i}", [1, 2, 3], sampling, **of_request) for i in range(num_sequences)]
    for engine, expected in zip(engines, alone, strict=True):
        answers = serve(engine, [victims[0], NEIGHBOUR, *victims[1:]])
        assert told(answers.pop("neighbour")) == expected
        codes = {answer.final.error_code for answer in answers.values() if answer.final is not None}
        assert "INTERNAL" not in codes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": NAN}, r"temperature is nan, expected a number in \[0, 3.40282e\+38\]"),
        ({"temperature": -1e-45}, r"temperature is -1e-45, expected"),
        ({"top_k": 2**70}, r"runtime_top_k is 1180591620717411303424, expected a number in \[0, 2.14748e\+09\]"),
        ({"top_p_decay": 1.5}, r"runtime_top_p_decay is 1.5, expected a number in \[1.4013e-45, 1\]"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0.0, expected a number in \[1.4013e-45, 3.40282e\+38\]"),
        ({"length_penalty": INF}, r"len_penalty is inf, expected a number in \[-3.40282e\+38, 3.40282e\+38\]"),
        ({"embedding_bias": ((4, 1.0), (5, NAN))}, r"the embedding_bias of token 5 is nan, expected a number in"),
        ({"embedding_bias": ((4, 1e39),)}, r"the embedding_bias of token 4 is 1e\+39, expected a number in"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_range(
    engines: list[Engine], options: dict[str, Any], message: str
) -> None:
    for engine in engines:
        with pytest.raises(InvalidRequest, match=message):
            engine.add_request(GenerationRequest("r", [1], SamplingParams(**{"max_tokens": 4} | options)))
        assert_idle(engine)


def test_a_timeout_that_is_no_number_is_refused(engines: list[Engine]) -> None:
    with pytest.raises(InvalidRequest, match="the timeout is nan"):
        engines[0].add_request(msgspec.structs.replace(NEIGHBOUR, timeout_s=NAN))


@pytest.mark.parametrize(
    ("num_blocks", "limit"), [(2, "32, all that kv_cache_memory_bytes has room for: no room"), (3, "32: no room")]
)
def test_a_prompt_that_is_too_long_is_told_with_what_limits_it(num_blocks: int, limit: str) -> None:
    limits = RequestLimits(32, 100, 1 << 20, 4, num_blocks, 16)
    request = GenerationRequest("r", [1] * 40, SamplingParams(1))
    with pytest.raises(InvalidRequest, match=f"the prompt has 40 tokens and max_model_len is {limit} to answer"):
        limits.check(request)


SOURCE = SourceFacts(
    max_tokens=24, decoder_start_token_id=2, forced_first_token_id=None, forced_last_token_id=None, pad_token_id=1
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source_token_ids": []}, "the source is empty: the encoder needs at least one token"),
        ({"source_token_ids": [1] * 25}, "the source has 25 tokens and the encoder's positions are 24"),
        ({"source_token_ids": [1, 100]}, "input_ids holds 100 at position 1, expected 0 .. 99"),
        ({"prompt_token_ids": []}, "the decoder's text is empty: it has no tokens"),
        ({"prompt_token_ids": [1] * 40}, "the decoder's text has 40 tokens and max_model_len is 32: no room to answer"),
        ({"prompt_token_ids": [1, -1]}, "decoder_input_ids holds -1 at position 1, expected 0 .. 99"),
        ({"lora_start": 0}, "lora_start is 0, and an adapter of an encoder-decoder model computes all tokens"),
        (
            {"sampling": SamplingParams(31, beam_width=4)},
            "a source of 5 tokens and 4 beams of up to 32 tokens may need 9 blocks of the KV cache, which has 8",
        ),
    ],
)
def test_a_source_or_a_beginning_that_no_encoder_decoder_can_have_is_refused_with_the_numbers(
    options: dict[str, Any], message: str
) -> None:
    limits = RequestLimits(32, 100, 1 << 20, 4, 8, 16, SOURCE, max_num_encoder_tokens=64)
    fine = GenerationRequest("r", [1], SamplingParams(9), source_token_ids=[1] * 5)
    limits.check(fine)
    assert limits.max_output_tokens(msgspec.structs.replace(fine, sampling=SamplingParams(99))) == 31
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        limits.check(msgspec.structs.replace(fine, **options))


def test_a_source_is_told_the_budget_that_it_exceeds_and_a_model_without_an_encoder_takes_none() -> None:
    limits = RequestLimits(32, 100, 1 << 20, 4, 8, 16, SOURCE, max_num_encoder_tokens=24)
    request = GenerationRequest("r", [1], SamplingParams(9), source_token_ids=[1] * 25)
    with pytest.raises(InvalidRequest, match="the source has 25 tokens and max_num_encoder_tokens is 24"):
        limits.check(request)
    with pytest.raises(InvalidRequest, match="a source of 25 tokens for an encoder, and the model has none"):
        RequestLimits(32, 100, 1 << 20, 4, 8, 16).check(request)
