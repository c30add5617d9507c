"""What Dynamo's front sends, as the engine understands it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.fake_engine import INFO

from multilora_engine.dynamo.requests import engine_request, read_request
from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.lora.names import task_id_of
from multilora_engine.request import GenerationRequest, Guide

NOTHING_SAID = {
    "sampling_options": dict.fromkeys(("n", "best_of", "temperature", "top_p", "top_k", "seed", "guided_decoding")),
    "stop_conditions": {"max_tokens": None, "stop": None, "stop_token_ids_hidden": [2], "ignore_eos": None},
    "output_options": {"logprobs": None, "prompt_logprobs": None, "skip_special_tokens": True},
    "routing": {"dp_rank": 0},
    "eos_token_ids": [2],
    "mdc_sum": "ab",
}


def read(**groups: Any) -> GenerationRequest:
    request = {"model": "base", "token_ids": [5, 6, 7], **NOTHING_SAID, **groups}
    return engine_request(read_request(request), "r", INFO)


def test_what_a_client_leaves_open_is_as_with_openai() -> None:
    request = read()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.is_greedy) == (1.0, 0, 1.0, False)
    assert sampling.max_tokens == INFO.max_model_len
    assert (sampling.end_id, sampling.stop_token_sequences) == (None, ())
    assert not sampling.return_log_probs
    assert (request.prompt_token_ids, request.lora_task_id, request.lora_name) == ([5, 6, 7], None, "")


def test_options_are_what_they_are_called() -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
    }
    sampling = read(sampling_options=options).sampling
    assert {name: getattr(sampling, name) for name in options} == options


def test_the_canary_goes_before_everybody() -> None:
    first = read(routing={"priority": 1_000_000})
    probe = engine_request(read_request({"token_ids": [0], "_HEALTH_CHECK": True}), "p", INFO, is_probe=True)
    assert probe.priority < first.priority


@pytest.mark.parametrize("top_k", [-1, 0])
def test_a_top_k_of_none_is_no_restriction(top_k: int) -> None:
    assert read(sampling_options={"top_k": top_k}).sampling.top_k == 0


def test_stops_end_the_answer_and_their_tokens_reach_the_front() -> None:
    stops = {"max_tokens": 9, "min_tokens": 2, "stop": ["END", ""], "stop_token_ids": [8], "stop_token_ids_hidden": [2]}
    sampling = read(stop_conditions=stops).sampling
    assert (sampling.max_tokens, sampling.num_tokens_without_stops, sampling.stop_words) == (9, 2, ("END",))
    assert sampling.stop_token_sequences == ((8,),), "the checkpoint's own end token is not among them"
    assert sampling.include_stop_str_in_output


def test_end_tokens_can_be_ignored() -> None:
    assert read(stop_conditions={"ignore_eos": True}).sampling.end_id == -1


@pytest.mark.parametrize(("asked", "number"), [(0, 0), (3, 3)])
def test_log_probs_of_answer_and_prompt(asked: int, number: int) -> None:
    sampling = read(output_options={"logprobs": asked, "prompt_logprobs": asked}).sampling
    assert sampling.return_log_probs
    assert sampling.return_prompt_log_probs
    assert (sampling.num_top_log_probs, sampling.num_prompt_top_log_probs) == (number, number)


@pytest.mark.parametrize(
    ("guided", "guide"),
    [
        ({"json": {"type": "object"}}, Guide("json_schema", '{"type": "object"}')),
        ({"json": '{"type": "object"}'}, Guide("json_schema", '{"type": "object"}')),
        ({"regex": "[0-9]+", "backend": "xgrammar"}, Guide("regex", "[0-9]+")),
        ({"grammar": "root ::= 'a'"}, Guide("ebnf_grammar", "root ::= 'a'")),
        ({"json": None, "regex": None}, None),
    ],
)
def test_guides(guided: dict[str, Any], guide: Guide | None) -> None:
    assert read(sampling_options={"guided_decoding": guided}).sampling.guide == guide


def test_a_choice_is_one_of_its_words_to_the_letter() -> None:
    words = ["a.b", "c|d", "(e)", "f\\g", "-h^", "i$&~"]
    guide = read(sampling_options={"guided_decoding": {"choice": words}}).sampling.guide
    assert guide is not None
    assert all(re.fullmatch(guide.text, word) for word in words)
    assert not re.fullmatch(guide.text, "axb")
    assert not re.fullmatch(guide.text, "c")


def test_an_adapter_is_known_by_its_name() -> None:
    request = read(routing={"lora_name": "pirate", "priority": 3})
    assert (request.lora_name, request.lora_task_id, request.adapter_tenant) == ("pirate", task_id_of("pirate"), "")


def test_priorities_go_the_other_way_and_no_further_than_allowed() -> None:
    assert read(routing={"priority": -4}).priority == 4
    assert read(routing={"priority": 4}).priority == INFO.clients.min_priority == 0


def test_prompts_of_different_salts_are_of_different_tenants() -> None:
    assert read(routing={"cache_salt": "s"}).sender.tenant == "s"
    assert read().sender.tenant == ""


@pytest.mark.parametrize(
    ("groups", "error", "says"),
    [
        ({"sampling_options": {"n": 2}}, Unsupported, "n 2"),
        ({"sampling_options": {"best_of": 3}}, Unsupported, "best_of 3"),
        ({"sampling_options": {"use_beam_search": True}}, Unsupported, "use_beam_search"),
        ({"sampling_options": {"temperature": -1}}, InvalidRequest, "temperature"),
        ({"sampling_options": {"mirostat": 2}}, InvalidRequest, "mirostat"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": {}}}}, Unsupported, "structural_tag"),
        ({"sampling_options": {"guided_decoding": {"whitespace_pattern": " "}}}, Unsupported, "whitespace_pattern"),
        ({"sampling_options": {"guided_decoding": {"choice": []}}}, InvalidRequest, "choice"),
        ({"sampling_options": {"guided_decoding": {"choice": ["a"], "regex": "b"}}}, InvalidRequest, "one of them"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, Unsupported, "max_thinking_tokens"),
        ({"stop_conditions": {"max_tokens": 3, "min_tokens": 4}}, InvalidRequest, "min_tokens is 4"),
        (
            {"stop_conditions": {"stop": ["w"] * 99_999}},
            InvalidRequest,
            "99999 stop words and bad words in all; a request may have 12",
        ),
        ({"multi_modal_data": {"image_url": ["u"]}}, Unsupported, "images"),
        ({"token_ids": ["a"]}, InvalidRequest, "token_ids"),
        ({"routing": {"lora_name": "../up"}}, InvalidRequest, "not plain"),
    ],
)
def test_what_cannot_be_done_is_said(groups: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        read(**groups)
