"""Requests that are as large as they may be, and by one larger."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.adapters import TINY, wire_adapter
from support.fake_engine import INFO
from support.fake_triton import FakeRequest

from multilora_engine.engine_info import SourceFacts
from multilora_engine.errors import InvalidRequest, RequestError, Unsupported
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.names import SetMember, set_task_id
from multilora_engine.request import Guide, SamplingParams
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.request_parser import (
    GenerateCall,
    UploadCall,
    check_call,
    is_stop,
    logits_bytes,
    read_call,
)
from multilora_engine.text.tokenizer import Tokenizer

MESSAGES = '[{"role": "user", "content": "Say hi"}]'
WIRE = wire_adapter(TINY, [(1, 0, 4), (6, 2, 7)], dtype=torch.float16)
WEIGHTS = WIRE.weights.numpy()[None]
CONFIG = WIRE.config.numpy()[None]


@pytest.fixture
def read(tokenizer: Tokenizer) -> Any:
    def read(tensors: dict[str, Any], info: Any = INFO) -> GenerateCall | UploadCall:
        return read_call(InputTensors(FakeRequest(tensors)), info, tokenizer)

    return read


def prompt(**more: Any) -> dict[str, Any]:
    return {"input_ids": [[5, 6, 7]], "max_tokens": [[9]], **more}


def without(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({}, {}),
        ({"temperature": [[1.0]], "runtime_top_k": [[1]], "runtime_top_p": [[0.0]]}, {}),
        ({"temperature": [[0.0]]}, {"temperature": 0.0, "top_k": 0}),
        ({"temperature": [[0.5]]}, {"temperature": 0.5, "top_k": 0}),
        ({"temperature": [[1.0]]}, {}),
        ({"temperature": [[1.0]], "runtime_top_p": [[0.0]]}, {}),
        ({"temperature": [[1.0]], "runtime_top_k": [[0]]}, {"top_k": 0}),
        ({"temperature": [[1.0]], "runtime_top_p": [[1.0]]}, {"top_k": 0}),
        ({"runtime_top_k": [[0]]}, {"top_k": 0}),
        ({"runtime_top_k": [[40]]}, {"top_k": 40}),
        ({"runtime_top_p": [[0.25]]}, {"top_p": 0.25, "top_k": 0}),
        ({"runtime_top_p": [[-1.0]]}, {}),
        (
            {"end_id": [[-1]], "min_tokens": [[9]], "seed": [[2**64 - 1]]},
            {"end_id": -1, "min_tokens": 9, "seed": 2**64 - 1},
        ),
        ({"end_id": [[INFO.vocab_size - 1]]}, {"end_id": INFO.vocab_size - 1}),
        ({"end_id": [[INFO.vocab_size]]}, {"end_id": -1}),
        ({"stop_words": [["\n", "", "End"]]}, {"stop_words": ("\n", "End")}),
        ({"stop_words": [[""]]}, {}),
        ({"min_p": [[0.25]]}, {"min_p": 0.25, "top_k": 0}),
        ({"min_p": [[0.0]]}, {}),
        (
            {
                "runtime_top_p_decay": [[0.5]],
                "runtime_top_p_min": [[0.25]],
                "runtime_top_p_reset_ids": [[3]],
                "repetition_penalty": [[1.5]],
                "presence_penalty": [[-0.5]],
                "frequency_penalty": [[2.0]],
            },
            {
                "top_p_decay": 0.5,
                "top_p_min": 0.25,
                "top_p_reset_id": 3,
                "repetition_penalty": 1.5,
                "presence_penalty": -0.5,
                "frequency_penalty": 2.0,
            },
        ),
        ({"return_log_probs": [[True]]}, {"return_log_probs": True}),
        ({"num_top_log_probs": [[2]]}, {"return_log_probs": True, "num_top_log_probs": 2}),
        ({"num_top_log_probs": [[0]]}, {}),
        ({"return_prompt_log_probs": [[True]]}, {"return_prompt_log_probs": True}),
        (
            {"num_prompt_top_log_probs": [[2]]},
            {"return_prompt_log_probs": True, "num_prompt_top_log_probs": 2},
        ),
        ({"include_stop_str_in_output": [[True]]}, {"include_stop_str_in_output": True}),
        ({"return_context_logits": [[True]]}, {"return_context_logits": True}),
        ({"return_generation_logits": [[True]]}, {"return_generation_logits": True}),
        ({"guided_decoding_guide_type": [["json"]]}, {"guide": Guide("json")}),
        ({"min_tokens_holds_stops": [[True]]}, {"min_tokens_holds_stops": True}),
        ({"guided_decoding_after_thinking": [[True]]}, {"guide_after_thinking": True}),
        (
            {"guided_decoding_guide_type": [["json_schema"]], "guided_decoding_guide": [["{}"]]},
            {"guide": Guide("json_schema", "{}")},
        ),
        ({"beam_width": [[1]], "num_return_sequences": [[1]], "pad_id": [[2]]}, {}),
        ({"beam_width": [[3]], "early_stopping": [[False]]}, {"beam_width": 3, "early_stopping": 0}),
        ({"beam_width": [[3]], "early_stopping": [[True]]}, {"beam_width": 3, "early_stopping": 1}),
        (
            {"len_penalty": [[1.5]], "beam_search_diversity_rate": [[-0.5]]},
            {"length_penalty": 1.5, "beam_search_diversity_rate": -0.5},
        ),
    ],
)
def test_sampling_is_greedy_unless_asked(read: Any, tensors: dict[str, Any], expected: dict[str, Any]) -> None:
    defaults = {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    assert read(prompt(**tensors)).sampling == [SamplingParams(max_tokens=9, **{**defaults, **expected})]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"temperature": [[-0.5]]}, r"temperature is -0.5, expected a number >= 0"),
        ({"temperature": [[np.nan]]}, r"temperature is nan"),
        ({"temperature": [[np.inf]]}, r"temperature is inf"),
        ({"runtime_top_p": [[1.5]]}, r"runtime_top_p is 1.5, expected a number <= 1"),
        ({"runtime_top_p": [[np.nan]]}, r"runtime_top_p is nan"),
        ({"runtime_top_k": [[-1]]}, r"runtime_top_k is -1, expected a number >= 0"),
        ({"runtime_top_p_decay": [[0.0]]}, r"runtime_top_p_decay is 0, expected a number > 0"),
        ({"runtime_top_p_decay": [[1.5]]}, r"runtime_top_p_decay is 1.5, expected a number in \[0, 1\]"),
        ({"runtime_top_p_min": [[np.nan]]}, r"runtime_top_p_min is nan"),
        ({"runtime_top_p_reset_ids": [[-2]]}, r"runtime_top_p_reset_ids is -2"),
        ({"min_p": [[1.5]]}, r"min_p is 1.5, expected a number in \[0, 1\]"),
        ({"min_p": [[np.nan]]}, r"min_p is nan"),
        ({"repetition_penalty": [[0.0]]}, r"repetition_penalty is 0, expected a number > 0"),
        ({"repetition_penalty": [[-1.0]]}, r"repetition_penalty is -1.0, expected a number >= 0"),
        ({"presence_penalty": [[np.nan]]}, r"presence_penalty is nan, expected a finite number"),
        ({"frequency_penalty": [[-np.inf]]}, r"frequency_penalty is -inf, expected a finite number"),
        ({"end_id": [[-2]]}, r"end_id is -2, expected a number >= -1"),
        ({"min_tokens": [[10]]}, r"min_tokens is 10, expected a number in \[0, 9\]"),
        ({"max_tokens": [[-3]]}, r"max_tokens is -3, expected a number >= 0"),
        ({"truncate_prompt_tokens": [[0]]}, r"truncate_prompt_tokens is 0, expected -1 .* or a number > 0"),
        ({"truncate_prompt_tokens": [[-2]]}, r"truncate_prompt_tokens is -2, expected a number >= -1"),
        (
            {"add_special_tokens": [[False]]},
            r"add_special_tokens goes with text_input or messages: input_ids are tokens",
        ),
        ({"num_prompt_top_log_probs": [[-1]]}, r"num_prompt_top_log_probs is -1, expected a number >= 0"),
        ({"request_output_len": [[8]]}, r"max_tokens 9 and request_output_len 8 contradict each other"),
        ({"guided_decoding_guide": [["x"]]}, r"guided_decoding_guide_type is None, expected one of json, json_schema"),
        ({"guided_decoding_guide_type": [["xml"]]}, r"guided_decoding_guide_type is xml, expected one of json,"),
        ({"guided_decoding_guide_type": [["regex"]]}, r"guided_decoding_guide is missing; a guide of type regex"),
        ({"num_return_sequences": [[0]]}, r"num_return_sequences is 0, expected a number in \[1, 128\]"),
        ({"num_return_sequences": [[129]]}, r"num_return_sequences is 129"),
        ({"num_top_log_probs": [[-1]]}, r"num_top_log_probs is -1, expected a number >= 0"),
        ({"beam_width": [[0]]}, r"beam_width is 0, expected a number >= 1"),
        ({"len_penalty": [[np.nan]]}, r"len_penalty is nan, expected a finite number"),
        ({"beam_search_diversity_rate": [[np.inf]]}, r"beam_search_diversity_rate is inf"),
        ({"max_tokens": [[1, 2]]}, r"max_tokens has shape \[1, 2\]"),
        ({"text_input": [["a"]]}, r"exactly one of .*; it has text_input and input_ids"),
        ({"input_lengths": [[4]]}, r"input_lengths is 4, expected 0 .. 3"),
        ({"input_lengths": [[-1]]}, r"input_lengths is -1"),
        ({"input_lengths": [[0]]}, r"empty prompt"),
        ({"input_ids": np.zeros((1, 0), np.int32)}, r"empty prompt"),
        ({"lora_weights": WEIGHTS}, r"must have both lora_weights and lora_keys .* only lora_weights"),
        ({"lora_config": CONFIG}, r"must have both lora_weights and lora_keys .* only lora_config"),
        ({"lora_weights": WEIGHTS, "lora_config": CONFIG}, r"lora_task_id must be set for LoRA inference"),
        (
            {"lora_weights": WEIGHTS, "lora_weights_fp32": WEIGHTS.astype(np.float32), "lora_config": CONFIG},
            r"one dtype, the request has lora_weights and lora_weights_fp32",
        ),
        (
            {"lora_weights": WEIGHTS[0], "lora_config": CONFIG, "lora_task_id": [[1]]},
            r"Invalid shape for lora_weights tensor",
        ),
    ],
)
def test_what_is_malformed_or_contradictory_is_refused_with_the_numbers(
    read: Any, tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(prompt(**tensors))


def test_a_search_answers_with_all_its_beams_unless_told_how_many(read: Any) -> None:
    assert read(prompt(beam_width=[[3]])).num_sequences == 3
    assert read(prompt(beam_width=[[3]], num_return_sequences=[[2]])).num_sequences == 2
    with pytest.raises(InvalidRequest, match=r"num_return_sequences is 4, expected a number in \[1, 3\]"):
        read(prompt(beam_width=[[3]], num_return_sequences=[[4]]))


def test_beams_are_not_streamed_and_are_as_many_in_every_row(read: Any) -> None:
    with pytest.raises(Unsupported, match="beam_width 3 together with streaming"):
        read(prompt(beam_width=[[3]], streaming=[[True]]))
    rows = {"input_ids": [[5], [6]], "input_lengths": [[1], [1]], "max_tokens": [[2], [2]]}
    with pytest.raises(InvalidRequest, match=r"beam_width is \d+ and \d+; it must be the same in every row"):
        read({**rows, "beam_width": [[3], [2]]})


def test_the_number_of_sequences_is_one_for_all_rows(read: Any) -> None:
    two = {"input_ids": [[5], [6]], "max_tokens": [[1], [1]]}
    assert read(two).num_sequences == 1
    assert read({**two, "num_return_sequences": [[3], [3]]}).num_sequences == 3
    with pytest.raises(InvalidRequest, match=r"num_return_sequences is \d+ and \d+; it must be the same in every row"):
        read({**two, "num_return_sequences": [[3], [2]]})


def test_guides_by_structural_tag_are_not_supported(read: Any) -> None:
    with pytest.raises(Unsupported, match="guides by json, json_schema, regex, ebnf_grammar"):
        read(prompt(guided_decoding_guide_type=[["structural_tag"]], guided_decoding_guide=[["{}"]]))


def test_a_missing_max_tokens_is_refused_and_upstreams_name_accepted(read: Any) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens is missing"):
        read(without(prompt(), "max_tokens"))
    assert read({"input_ids": [[5]], "request_output_len": [[4]]}).sampling[0].max_tokens == 4
    assert read(prompt(request_output_len=[[9]])).sampling[0].max_tokens == 9


def test_a_text_is_tokenized_with_the_engines_options(read: Any, tokenizer: Tokenizer) -> None:
    tensors = {"text_input": [["Grüße 🏴‍☠️"]], "max_tokens": [[1]]}
    assert read(tensors).prompts == [tokenizer.encode("Grüße 🏴‍☠️", add_special_tokens=True)]


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "kept"),
    [
        (None, 9, [5, 6, 7]),
        (1, 9, [7]),
        (2, 9, [6, 7]),
        (3, 9, [5, 6, 7]),
        (400, 9, [5, 6, 7]),
        (-1, 9, [5, 6, 7]),
        (-1, 62, [6, 7]),
        (-1, 63, [7]),
    ],
)
def test_a_prompt_is_cut_to_its_last_tokens(
    read: Any, num_tokens: int | None, max_tokens: int, kept: list[int]
) -> None:
    assert INFO.max_model_len == 64
    asked = {} if num_tokens is None else {"truncate_prompt_tokens": [[num_tokens]]}
    assert read(prompt(**asked) | {"max_tokens": [[max_tokens]]}).prompts == [kept]


def test_every_row_is_cut_by_its_own_number(read: Any) -> None:
    rows = {"input_ids": [[5, 6, 7], [8, 9, 10]], "max_tokens": [[9], [0]], "truncate_prompt_tokens": [[1], [2]]}
    call = read(rows)
    assert call.prompts == [[7], [9, 10]]
    assert [sampling.max_tokens for sampling in call.sampling] == [9, 0]


def test_a_prompt_without_any_room_is_refused(read: Any) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens 64 leaves no room for a prompt: max_model_len is 64"):
        read(prompt(truncate_prompt_tokens=[[-1]]) | {"max_tokens": [[64]]})


def test_messages_go_through_the_chat_template(read: Any, tokenizer: Tokenizer) -> None:
    call = read({"messages": [[MESSAGES]], "max_tokens": [[1]]})
    assert call.prompts == [tokenizer.apply_chat_template([{"role": "user", "content": "Say hi"}])]


def test_an_object_of_messages_is_the_same_chat(read: Any, tokenizer: Tokenizer) -> None:
    chat = f'{{"messages": {MESSAGES}, "tools": []}}'
    assert (
        read({"messages": [[chat]], "max_tokens": [[1]]}).prompts
        == read({"messages": [[MESSAGES]], "max_tokens": [[1]]}).prompts
    )


@pytest.mark.parametrize(
    "text",
    ["", "hello", "{}", '["hi"]', '[{"content": "no role"}]', "[]", f'{{"messages": {MESSAGES}, "tool": []}}'],
)
def test_messages_that_are_no_chat_are_refused(read: Any, text: str) -> None:
    with pytest.raises(InvalidRequest):
        read({"messages": [[text]], "max_tokens": [[1]]})


def test_an_empty_text_is_an_empty_prompt(read: Any) -> None:
    with pytest.raises(InvalidRequest, match="empty prompt"):
        read({"text_input": [[""]], "max_tokens": [[1]]})


def test_rows_have_their_own_prompt_sampling_and_adapter(read: Any) -> None:
    call = read(
        {
            "input_ids": [[5, 6, 7], [8, 0, 0]],
            "input_lengths": [[3], [1]],
            "max_tokens": [[2], [4]],
            "seed": [[0], [1]],
            "lora_task_id": [[0], [2**64 - 1]],
            "lora_start": [[2], [0]],
            "lora_expected_digest": [["ab" * 16], ["01" * 16]],
        }
    )
    assert call.prompts == [[5, 6, 7], [8]]
    assert [(sampling.max_tokens, sampling.seed) for sampling in call.sampling] == [(2, 0), (4, 1)]
    assert call.lora_task_ids == [0, 2**64 - 1]
    assert call.lora_starts == [2, 0]
    assert call.lora_expected_digests == ["ab" * 16, "01" * 16]
    assert call.adapter is None


def test_a_tensor_with_fewer_rows_than_the_prompt_is_refused(read: Any) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens has shape"):
        read({"input_ids": [[5], [6]], "max_tokens": [[2]]})


def test_defaults_of_the_answer_come_from_the_engine_and_the_request_overrides_them(read: Any) -> None:
    excluding = dataclasses.replace(INFO, exclude_input_in_output=True)
    assert read(prompt()).excludes_input is False
    assert read(prompt(), excluding).excludes_input is True
    assert read(prompt(exclude_input_in_output=[[False]]), excluding).excludes_input is False
    assert read(prompt()).is_streaming is False
    assert read(prompt(streaming=[[True]])).is_streaming is True


def test_rows_are_padded_with_pad_id_else_the_end_token(read: Any) -> None:
    assert read(prompt(pad_id=[[7]], end_id=[[8]])).pad_id == 7
    assert read(prompt(pad_id=[[-1]], end_id=[[8]])).pad_id == 8
    assert read(prompt(end_id=[[-1]])).pad_id == INFO.end_token_ids[0]
    assert read(prompt(), dataclasses.replace(INFO, end_token_ids=())).pad_id == 0


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("lora_weights", WEIGHTS),
        ("lora_weights_bf16", WIRE.weights[None].bfloat16()),
        ("lora_weights_fp32", WEIGHTS.astype(np.float32)),
    ],
)
def test_an_adapter_is_packed_whatever_its_dtype_and_copied_out_of_the_request(
    read: Any, name: str, weights: Any
) -> None:
    tensors = prompt(**{name: weights, "lora_config": CONFIG, "lora_task_id": [[0]]})
    wire = torch.as_tensor(weights)[0]
    expected = pack_adapter(wire.clone(), WIRE.config, TINY)
    sent = read(tensors).adapter
    packed = sent.pack()
    assert (sent.lora_task_id, packed.digest) == (0, expected.digest)
    assert packed.pages.untyped_storage().data_ptr() != wire.untyped_storage().data_ptr()


def test_an_adapter_and_an_id_alone_are_an_upload(read: Any) -> None:
    call = read({"lora_weights": WEIGHTS, "lora_config": CONFIG, "lora_task_id": [[3]]})
    assert isinstance(call, UploadCall)
    expected = pack_adapter(WIRE.weights, WIRE.config, TINY)
    assert (call.adapter.lora_task_id, call.adapter.pack().digest) == (3, expected.digest)


@pytest.mark.parametrize(
    "digest", ["", "ab", "AB" * 16, "ab" * 17, "xy" * 16, " " + "ab" * 16, "ab" * 16 + "\n", "é" * 32]
)
def test_a_digest_that_lora_digest_would_not_tell_is_refused(read: Any, digest: str) -> None:
    for tensors in (
        prompt(lora_task_id=[[3]]),
        {"lora_weights": WEIGHTS, "lora_config": CONFIG, "lora_task_id": [[3]]},
    ):
        with pytest.raises(InvalidRequest, match=r"lora_expected_digest is .*, expected 32 hex digits in lower case"):
            read({**tensors, "lora_expected_digest": [[digest]]})


def test_the_digest_of_an_upload_alone_is_that_of_the_version_before(read: Any) -> None:
    upload = {"lora_weights": WEIGHTS, "lora_config": CONFIG, "lora_task_id": [[3]]}
    assert read(upload).expected_digest == ""
    assert read({**upload, "lora_expected_digest": [["ab" * 16]]}).expected_digest == "ab" * 16


def test_an_upload_alone_starts_nowhere(read: Any) -> None:
    with pytest.raises(InvalidRequest, match="lora_start goes with a prompt"):
        read({"lora_weights": WEIGHTS, "lora_config": CONFIG, "lora_task_id": [[3]], "lora_start": [[0]]})


def test_an_adapter_with_max_tokens_but_no_prompt_is_no_upload(read: Any) -> None:
    with pytest.raises(InvalidRequest, match="it has none of them"):
        read({"lora_weights": WEIGHTS, "lora_config": CONFIG, "lora_task_id": [[3]], "max_tokens": [[1]]})


def test_what_the_adapter_format_refuses_is_refused(read: Any) -> None:
    config = CONFIG + np.array([0, 99, 0, 0], np.int32)
    sent = read(prompt(lora_weights=WEIGHTS, lora_config=config, lora_task_id=[[1]])).adapter
    with pytest.raises(RequestError, match="Expected layerId to be in the range"):
        sent.pack()


def test_stop_is_seen_whatever_else_is_in_the_request() -> None:
    assert is_stop(InputTensors(FakeRequest({"stop": [[True]], "input_ids": [[0]]})))
    assert not is_stop(InputTensors(FakeRequest({"stop": [[False]]})))
    assert not is_stop(InputTensors(FakeRequest({})))


def set_tensors(task_ids: list[Any], weights: list[Any]) -> dict[str, Any]:
    return {
        "lora_set_task_ids": np.array([task_ids], np.uint64),
        "lora_set_weights": np.array([weights], np.float32),
    }


def test_a_set_is_an_adapter_by_its_members_in_any_order(read: Any) -> None:
    call = read(prompt(**set_tensors([2**64 - 1, 7], [0.5, -2.0])))
    members = (SetMember(7, -2.0), SetMember(2**64 - 1, 0.5))
    assert (call.lora_sets, call.lora_task_ids) == ([members], [set_task_id(members)])
    assert read(prompt(**set_tensors([7, 2**64 - 1], [-2.0, 0.5]))).lora_task_ids == call.lora_task_ids
    assert read(prompt()).lora_sets == [()]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (without(set_tensors([7], [1.0]), "lora_set_weights"), "the request has only lora_set_task_ids"),
        (without(set_tensors([7], [1.0]), "lora_set_task_ids"), "the request has only lora_set_weights"),
        (set_tensors([7, 8], [1.0]), "lora_set_task_ids has 2 values and lora_set_weights 1"),
        (set_tensors([], []), "a set has 1 to 8 members, this one has 0"),
        (set_tensors([7], [np.nan]), "the weight of LoRA task 7 in the set is nan"),
        (set_tensors([7, 7], [1.0, 2.0]), "LoRA task 7 is in the set twice"),
        ({**set_tensors([7], [1.0]), "lora_task_id": [[7]]}, "and lora_task_id: it can have one adapter"),
        ({**set_tensors([7], [1.0]), "lora_name": [["x"]]}, "and lora_name: it can have one adapter"),
        (
            {**set_tensors([7], [1.0]), "lora_weights": WEIGHTS, "lora_config": CONFIG},
            "and lora_weights: it can have one adapter",
        ),
    ],
)
def test_a_set_that_is_none_or_not_alone_is_refused(read: Any, tensors: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(prompt(**tensors))
    assert reason in str(caught.value)


SCHEMAS = [Guide("json_schema", f'{{"title": "{i}"}}') for i in range(3)]


def call(num_rows: int = 1, prompt_tokens: int = 1, num_sequences: int = 1, **sampling: Any) -> GenerateCall:
    return rows([SamplingParams(4, **sampling)] * num_rows, prompt_tokens, num_sequences)


def rows(sampling: list[SamplingParams], prompt_tokens: int = 1, num_sequences: int = 1) -> GenerateCall:
    return GenerateCall(
        prompts=[[5] * prompt_tokens] * len(sampling),
        sources=[[]] * len(sampling),
        num_sequences=num_sequences,
        sampling=sampling,
        lora_task_ids=[None] * len(sampling),
        lora_names=[""] * len(sampling),
        lora_starts=[None] * len(sampling),
        lora_sets=[()] * len(sampling),
        lora_paths=[""] * len(sampling),
        lora_expected_digests=[""] * len(sampling),
        lora_sessions=[""] * len(sampling),
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


BART = SourceFacts(
    max_tokens=40, decoder_start_token_id=2, forced_first_token_id=None, forced_last_token_id=None, pad_token_id=1
)
SOURCE_INFO = dataclasses.replace(INFO, source=BART)


def beginning(*rows: list[int], **more: Any) -> dict[str, Any]:
    return prompt(decoder_input_ids=[*rows], **more)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [2]),
        ({"decoder_input_ids": [[1]]}, [2]),
        ({"decoder_input_ids": [[1]], "decoder_input_lengths": [[1]]}, [2]),
        ({"decoder_input_ids": [[77]], "pad_id": [[77]]}, [2]),
        ({"decoder_input_ids": np.zeros((1, 0), np.int32)}, [2]),
        ({"decoder_input_ids": [[8, 9]], "decoder_input_lengths": [[0]]}, [2]),
        ({"decoder_input_ids": [[77]]}, [77]),
        ({"decoder_input_ids": [[2]]}, [2]),
        ({"decoder_input_ids": [[1, 1]]}, [1, 1]),
        ({"decoder_input_ids": [[2, 8, 9, 3]]}, [2, 8, 9, 3]),
        ({"decoder_input_ids": [[2, 8, 1, 1]], "decoder_input_lengths": [[2]]}, [2, 8]),
        ({"decoder_input_ids": [[8, 1, 1]], "decoder_input_lengths": [[1]]}, [8]),
        ({"decoder_text_input": [[""]]}, [2]),
        ({"decoder_text_input": [[""]], "decoder_input_ids": [[7, 8]]}, [7, 8]),
    ],
)
def test_an_encoder_reads_the_prompt_and_the_answer_has_a_beginning_of_its_own(
    read: Any, more: dict[str, Any], expected: list[int]
) -> None:
    call = read(prompt(**more), SOURCE_INFO)
    assert (call.sources, call.prompts) == ([[5, 6, 7]], [expected])


def test_the_text_of_a_beginning_follows_the_start_token_and_gets_no_special_tokens(
    read: Any, tokenizer: Tokenizer
) -> None:
    tensors = without(prompt(), "input_ids") | {"text_input": [["a source"], ["b"]], "max_tokens": [[9], [9]]}
    call = read(tensors | {"decoder_text_input": [["Es war"], [""]], "decoder_input_ids": [[1], [1]]}, SOURCE_INFO)
    assert call.sources == [tokenizer.encode(text, add_special_tokens=True) for text in ("a source", "b")]
    assert call.prompts == [[2, *tokenizer.encode("Es war", add_special_tokens=False)], [2]]


def test_rows_of_a_batch_have_beginnings_of_their_own_lengths(read: Any) -> None:
    tensors = {"input_ids": [[5, 6], [7, 0], [8, 9]], "input_lengths": [[2], [1], [2]], "max_tokens": [[4]] * 3}
    tensors |= {"decoder_input_ids": [[2, 6, 7], [2, 0, 0], [1, 0, 0]], "decoder_input_lengths": [[3], [1], [1]]}
    call = read(tensors, SOURCE_INFO)
    assert (call.sources, call.prompts) == ([[5, 6], [7], [8, 9]], [[2, 6, 7], [2], [2]])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"decoder_input_ids": [[5, 6]], "decoder_input_lengths": [[3]]},
            "decoder_input_lengths is 3, expected 0 .. 2",
        ),
        ({"decoder_input_ids": [[5, 6]], "decoder_input_lengths": [[-1]]}, "decoder_input_lengths is -1"),
        ({"decoder_input_lengths": [[2]]}, "decoder_input_lengths goes with decoder_input_ids"),
        ({"decoder_input_ids": [[5, 6]], "decoder_text_input": [["x"]]}, "both begin the answer"),
        ({"decoder_input_ids": [[[5, 6]]]}, "decoder_input_ids has shape"),
        ({"decoder_text_input": [["x" * 10_001]]}, "decoder_text_input has 10001 bytes"),
        ({"decoder_text_input": np.array([[b"\xff"]], object)}, "decoder_text_input is not valid UTF-8"),
    ],
)
def test_beginnings_that_cannot_be_meant_are_refused_by_name(read: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(prompt(**more), SOURCE_INFO)


@pytest.mark.parametrize("name", ["decoder_input_ids", "decoder_input_lengths", "decoder_text_input"])
def test_a_model_without_an_encoder_takes_no_beginning_of_the_answer(read: Any, name: str) -> None:
    values = {"decoder_input_ids": [[5, 6]], "decoder_input_lengths": [[2]], "decoder_text_input": [["x"]]}
    with pytest.raises(Unsupported, match=f"^{name}: this server has no encoder-decoder models"):
        read(prompt(**{name: values[name]}))
    call = read(prompt(decoder_input_ids=[[1]], decoder_input_lengths=[[1]], decoder_text_input=[[""]]))
    assert (call.sources, call.prompts) == ([[]], [[5, 6, 7]])


@pytest.mark.parametrize(
    "name", ["encoder_input_features", "encoder_output_lengths", "cross_attention_mask", "skip_cross_attn_blocks"]
)
def test_an_encoder_takes_no_features_and_no_masks(read: Any, name: str) -> None:
    values = {"encoder_input_features": [[[0.5]]], "cross_attention_mask": [[[True]]]}
    with pytest.raises(Unsupported, match=f"^{name}: this server has no (models whose|masks of)"):
        read(prompt(**{name: values.get(name, [[1]])}), SOURCE_INFO)


def test_a_model_with_an_encoder_has_no_chats(read: Any) -> None:
    tensors = without(prompt(messages=[['[{"role": "user", "content": "x"}]']]), "input_ids")
    with pytest.raises(InvalidRequest, match=r"^messages: the model has an encoder, and no chats; send text_input"):
        read(tensors, SOURCE_INFO)


def test_the_familys_first_token_is_forced_where_the_answer_has_the_usual_start_alone(read: Any) -> None:
    info = dataclasses.replace(INFO, source=dataclasses.replace(BART, forced_first_token_id=9, forced_last_token_id=2))
    tensors = {"input_ids": [[5]] * 4, "max_tokens": [[3]] * 4, "decoder_input_lengths": [[1], [1], [1], [2]]}
    call = read(tensors | {"decoder_input_ids": [[1, 0], [2, 0], [5, 0], [2, 5]]}, info)
    assert [sampling.forced_first_id for sampling in call.sampling] == [9, 9, None, None]
    assert {sampling.forced_last_id for sampling in call.sampling} == {2}
    assert {sampling.forced_first_id for sampling in read(prompt()).sampling} == {None}


def test_a_source_is_cut_to_what_the_encoder_takes(read: Any) -> None:
    tensors = prompt(input_ids=[[*range(50)]], max_tokens=[[500]], truncate_prompt_tokens=[[-1]])
    assert read(tensors, SOURCE_INFO).sources == [[*range(10, 50)]]
    assert read(tensors | {"truncate_prompt_tokens": [[3]]}, SOURCE_INFO).sources == [[47, 48, 49]]


def test_tokens_of_sources_count_as_prompt_tokens() -> None:
    check_call(replace(call(2), sources=[[5] * 127] * 2), INFO)
    with pytest.raises(InvalidRequest, match="258 prompt tokens in all; a request may have 256"):
        check_call(replace(call(2), sources=[[5] * 128] * 2), INFO)
