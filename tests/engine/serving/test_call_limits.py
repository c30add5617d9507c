"""Requests that are as large as they may be, and by one larger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.fake_engine import INFO

from multilora_engine.errors import InvalidRequest
from multilora_engine.request import Guide, SamplingParams
from multilora_engine.serving.request_parser import GenerateCall, check_call, logits_bytes

SCHEMAS = [Guide("json_schema", f'{{"title": "{i}"}}') for i in range(3)]


def call(num_rows: int = 1, prompt_tokens: int = 1, num_sequences: int = 1, **sampling: Any) -> GenerateCall:
    return rows([SamplingParams(4, **sampling)] * num_rows, prompt_tokens, num_sequences)


def rows(sampling: list[SamplingParams], prompt_tokens: int = 1, num_sequences: int = 1) -> GenerateCall:
    return GenerateCall(
        prompts=[[5] * prompt_tokens] * len(sampling),
        num_sequences=num_sequences,
        sampling=sampling,
        lora_task_ids=[None] * len(sampling),
        lora_names=[""] * len(sampling),
        lora_starts=[None] * len(sampling),
        lora_sets=[()] * len(sampling),
        priorities=[0] * len(sampling),
        adapter=None,
        is_streaming=False,
        excludes_input=False,
        pad_id=0,
        returns_perf=False,
        returns_kv_cache=False,
        vocab_size=INFO.vocab_size,
    )


@pytest.mark.parametrize(
    ("most", "too_much", "message"),
    [
        (call(4, num_sequences=4), call(17), "17 sequences in all; a request may have 16"),
        (call(4, num_sequences=4), call(3, num_sequences=6), "18 sequences"),
        (call(4, beam_width=4), call(5, num_sequences=2, beam_width=4), "20 sequences"),
        (call(2, 64, 2), call(2, 65, 2), "260 prompt tokens in all; a request may have 256"),
        (
            call(2, 50, 1, return_prompt_log_probs=True, num_prompt_top_log_probs=4),
            call(2, 50, 1, return_prompt_log_probs=True, num_prompt_top_log_probs=5),
            "600 prompt log-probs in all; a request may have 500",
        ),
        (
            call(2, stop_words=("a", "b"), stop_token_sequences=((1,),), bad_token_sequences=((2,), (3,), (4,))),
            call(1, num_sequences=5, stop_words=("a", "b"), bad_token_sequences=((2,),)),
            "15 stop words and bad words in all; a request may have 12",
        ),
        (
            call(2, stop_words=("é" * 4,), stop_token_sequences=((1, 2, 3),), bad_token_sequences=((1, 2, 3),)),
            call(2, stop_words=("é" * 4,), stop_token_sequences=((1, 2, 3),), bad_token_sequences=((1, 2, 3, 4),)),
            "72 bytes of stop words and bad words in all; a request may have 64",
        ),
        (
            call(2, embedding_bias=tuple((i, 1.0) for i in range(10))),
            call(3, embedding_bias=tuple((i, 1.0) for i in range(7))),
            "21 biases in all; a request may have 20",
        ),
        (
            rows([SamplingParams(4, guide=SCHEMAS[i % 2]) for i in range(8)]),
            rows([SamplingParams(4, guide=guide) for guide in SCHEMAS]),
            "3 different guides in all; a request may have 2",
        ),
        (
            call(1, 60, 2, return_context_logits=True, return_generation_logits=True),
            call(1, 60, 3, return_context_logits=True),
            "1474560 bytes of logits in all; a request may have 1048576",
        ),
    ],
)
def test_a_request_may_be_so_large_and_no_larger(most: GenerateCall, too_much: GenerateCall, message: str) -> None:
    check_call(most, INFO)
    with pytest.raises(InvalidRequest, match=message):
        check_call(too_much, INFO)


def test_a_model_that_streams_has_a_limit_of_its_own_on_logits() -> None:
    info = replace(INFO, limits=replace(INFO.limits, max_streamed_logits_bytes=60 * 4 * INFO.vocab_size))
    check_call(call(1, 60, return_context_logits=True), info, can_stream=True)
    check_call(call(1, 61, return_context_logits=True), info)
    with pytest.raises(InvalidRequest, match="499712 bytes of logits in all; a request may have 491520"):
        check_call(call(1, 61, return_context_logits=True), info, can_stream=True)
    with pytest.raises(InvalidRequest, match="a request may have 491520"):
        check_call(call(3, 60, return_context_logits=True), info, can_stream=True)


def test_the_beams_of_a_search_share_words_and_prompt() -> None:
    check_call(call(1, 256, 4, beam_width=4, stop_words=tuple("abcdefghijkl")), INFO)


def test_logits_are_of_the_prompt_and_of_as_many_tokens_as_there_is_room_for() -> None:
    row_bytes = 4 * INFO.vocab_size
    assert logits_bytes(call(2, 60, 3, return_context_logits=True), INFO) == 2 * 60 * 3 * row_bytes
    assert logits_bytes(call(1, 60, 3, return_generation_logits=True), INFO) == 4 * 3 * row_bytes
    assert logits_bytes(call(1, 62, 1, return_generation_logits=True), INFO) == 2 * row_bytes
    assert logits_bytes(call(1, 62), INFO) == 0
