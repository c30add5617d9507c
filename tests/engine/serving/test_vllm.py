"""Requests of Triton's vLLM backend: what `generation` is asked in their place, and how the answers look."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.adapters import TINY, wire_adapter
from support.fake_engine import HOLD, INFO, FakeEngine, text_of
from support.fake_triton import FakeRequest, FakeResponse
from support.served_engine import served

from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.names import task_id_of
from multilora_engine.request import Guide, SamplingParams, TokenLogProb, TokenOutput
from multilora_engine.serving.front import EngineLink
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.outputs import ReplyRow
from multilora_engine.serving.request_parser import read_call
from multilora_engine.serving.vllm import VllmFront, VllmResponder, VllmSampling, read_vllm_sampling, tensors_of
from multilora_engine.text.tokenizer import Tokenizer

OUTPUTS = (
    "text_output",
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
)
PROMPT = "Hello  there"
"""With two spaces: the prompt comes back as it was written, not as its tokens spell it."""


@pytest.fixture
def engine(tmp_path: Path, default_model_dir: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine()
    engine.info = dataclasses.replace(INFO, tokenizer_path=str(default_model_dir), vocab_size=49152)
    with served(engine, tmp_path / "engine.sock"):
        yield engine


@pytest.fixture
def front(link: EngineLink) -> Iterator[VllmFront]:
    front = VllmFront(link, can_stream=True)
    yield front
    front.close()


def text(*texts: str) -> np.ndarray:
    return np.array([text.encode() for text in texts], np.object_)


def flag(value: bool = True) -> np.ndarray:
    return np.array([value])


def ask(
    front: VllmFront, sampling: Any = None, parameters: dict[str, Any] | None = None, **more: Any
) -> list[FakeResponse]:
    """All responses to a prompt. sampling: of the tensor, as JSON or as an object. parameters: of the request."""
    tensors = {"text_input": text(PROMPT), **more}
    if sampling is not None:
        tensors["sampling_parameters"] = text(sampling if isinstance(sampling, str) else json.dumps(sampling))
    request = FakeRequest(tensors, output_names=OUTPUTS, own_parameters=parameters or {})
    front.accept(request)
    return request.sender.wait()


def error_of(responses: list[FakeResponse]) -> tuple[str, str]:
    (response,) = responses
    assert response.error is not None
    return response.error.code, response.error.message


def sampling_of(engine: FakeEngine) -> SamplingParams:
    return engine.accepted[-1].sampling


def test_a_whole_answer_comes_after_the_prompt_as_it_was_written(front: VllmFront, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT, add_special_tokens=True)
    answer = "".join(text_of(prompt[i % len(prompt)]) for i in range(16))
    (response,) = ask(front)
    assert list(response.arrays) == ["text_output"]
    assert response.arrays["text_output"].shape == (1,)
    assert response.texts() == [PROMPT + answer]
    assert ask(front, exclude_input_in_output=flag(False))[0].texts() == [PROMPT + answer]
    assert ask(front, exclude_input_in_output=flag())[0].texts() == [answer]


def test_a_stream_has_new_text_only(front: VllmFront) -> None:
    (whole,) = ask(front, exclude_input_in_output=flag())
    for more in ({}, {"exclude_input_in_output": flag()}):
        parts = ask(front, stream=flag(), **more)
        assert len(parts) > 1
        assert "".join(part.texts()[0] for part in parts) == whole.texts()[0]
    code, message = error_of(ask(front, stream=flag(), exclude_input_in_output=flag(False)))
    assert code == "INVALID_ARG"
    assert "When streaming, `exclude_input_in_output` = False is not allowed." in message


def test_without_parameters_an_answer_is_drawn_as_vllm_draws_it(front: VllmFront, engine: FakeEngine) -> None:
    ask(front)
    sampling = sampling_of(engine)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (16, 1.0, 0, 1.0)
    assert not sampling.is_greedy


@pytest.mark.parametrize("is_tensor", [True, False])
def test_values_may_be_strings_in_the_tensor_and_among_the_parameters(
    front: VllmFront, engine: FakeEngine, is_tensor: bool
) -> None:
    given = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "3", "ignore_eos": "true", "top_k": -1, "seed": "-1"}
    ask(front, given if is_tensor else None, given)
    sampling = sampling_of(engine)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.1, 0.95, 3)
    assert (sampling.end_id, sampling.top_k, sampling.seed) == (-1, 0, None)


def test_all_that_vllm_has_and_this_server_too(front: VllmFront, engine: FakeEngine) -> None:
    ask(
        front,
        {
            "max_tokens": 5,
            "min_tokens": 2,
            "min_p": 0.1,
            "seed": -7,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "repetition_penalty": 1.5,
            "stop": ["END", "STOP"],
            "stop_token_ids": [5, 6],
            "logit_bias": {"7": 300, "8": -1.5},
            "include_stop_str_in_output": True,
            "logprobs": 3,
            "truncate_prompt_tokens": 1,
            "structured_outputs": json.dumps({"choice": ["a.", "b"]}),
            "detokenize": True,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": False,
            "best_of": None,
        },
    )
    request, sampling = engine.accepted[-1], sampling_of(engine)
    assert len(request.prompt_token_ids) == 1
    assert (sampling.max_tokens, sampling.num_tokens_without_stops, sampling.min_p) == (5, 2, 0.1)
    assert sampling.seed == 2**64 - 7
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, 0.25, 1.5)
    assert (sampling.stop_words, sampling.stop_token_sequences) == (("END", "STOP"), ((5,), (6,)))
    assert dict(sampling.embedding_bias) == {7: 100.0, 8: -1.5}, "vLLM cuts biases"
    assert sampling.include_stop_str_in_output
    assert (sampling.return_log_probs, sampling.num_top_log_probs) == (True, 3)
    assert sampling.guide == Guide("regex", r"a\.|b")


def test_an_answer_without_limit_ends_with_the_context(front: VllmFront, engine: FakeEngine) -> None:
    ask(front, {"max_tokens": None})
    assert sampling_of(engine).max_tokens == engine.info.max_model_len


def test_a_bad_word_is_banned_with_and_without_a_space_before_it(tokenizer: Tokenizer) -> None:
    words = tensors_of(read_vllm_sampling({"bad_words": [" cat"]}), INFO, tokenizer)["bad_words"]
    assert words.tolist() == [[b"cat", b" cat"]]
    bare, spaced = tokenizer.encode_words(["cat", " cat"])
    assert len(bare) == len(spaced)


def test_an_adapter_is_asked_for_by_its_name(front: VllmFront, engine: FakeEngine) -> None:
    wire = wire_adapter(TINY, [(1, 0, 4)])
    engine.put_adapter(task_id_of("pirate"), pack_adapter(wire.weights, wire.config, TINY))
    for arguments in ({"sampling": {"lora_name": "pirate"}}, {"parameters": {"lora_name": "pirate"}}):
        assert ask(front, **arguments)[0].error is None
        request = engine.accepted[-1]
        assert (request.lora_task_id, request.lora_name) == (task_id_of("pirate"), "pirate")
    assert ask(front, {"lora_name": "pirate", "lora_expected_digest": "ab" * 16})[0].error is None
    assert engine.accepted[-1].lora_expected_digest == "ab" * 16
    code, message = error_of(ask(front, {"lora_name": "nobody"}))
    assert code == "NOT_FOUND"
    assert "LoRA adapter 'nobody' not found in cache" in message


def test_what_is_told_beside_the_text(front: VllmFront, tokenizer: Tokenizer) -> None:
    flags = {f"return_{name}": flag() for name in OUTPUTS[1:]}
    *parts, last = ask(front, {"max_tokens": 3}, stream=flag(), **flags)
    for response in (*parts, last):
        assert {name: array.dtype for name, array in response.arrays.items()} == {
            "text_output": np.object_,
            "finish_reason": np.object_,
            "cumulative_logprob": np.float32,
            "logprobs": np.object_,
            "num_input_tokens": np.uint32,
            "num_output_tokens": np.uint32,
        }
        assert all(array.shape == (1,) for array in response.arrays.values())
        assert response.arrays["logprobs"].tolist() == [b"null"]
        assert response.arrays["num_input_tokens"].tolist() == [len(tokenizer.encode(PROMPT, True))]
    assert [part.arrays["finish_reason"].tolist() for part in parts] == [[b"None"]] * len(parts)
    assert last.arrays["finish_reason"].tolist() == [b"length"]
    assert sum(response.arrays["num_output_tokens"].item() for response in (*parts, last)) == 3


def test_several_answers_come_in_one_response(front: VllmFront) -> None:
    (response,) = ask(front, {"n": 3, "max_tokens": 2}, return_num_output_tokens=flag(), return_finish_reason=flag())
    assert response.arrays["text_output"].shape == (3,)
    assert all(answer.startswith(PROMPT) for answer in response.texts())
    assert response.arrays["num_output_tokens"].tolist() == [2, 2, 2]
    assert response.arrays["finish_reason"].tolist() == [b"length"] * 3


@pytest.mark.parametrize(
    ("num_top", "second"), [(0, {}), (2, {"6": {"logprob": -2.0, "rank": 2, "decoded_token": "F"}})]
)
def test_log_probs_are_of_each_new_token_and_of_the_likeliest(num_top: int, second: dict[str, Any]) -> None:
    responder = VllmResponder(FakeRequest({}, output_names=OUTPUTS))
    responder.told, responder.num_top = {"return_logprobs"}, num_top
    row = ReplyRow(returns_log_probs=True, returns_top_log_probs=True, token_bytes=lambda i: bytes([64 + i]))
    top = ((5, -1.0), (6, -2.0))
    likeliest, other = TokenLogProb(-1.0, top), TokenLogProb(-9.0, top)
    output = TokenOutput("r", [5, 63 + 64], "E", log_probs=[likeliest, other])
    responder.respond([row.answer(output)], pad_id=0, is_final=True)
    ((response, _),) = responder._unsent
    first, other_token = json.loads(response.arrays["logprobs"][0])
    assert first == {"5": {"logprob": -1.0, "rank": 1, "decoded_token": "E"}, **second}
    assert other_token.pop("127") == {"logprob": -9.0, "rank": None, "decoded_token": "\ufffd"}
    assert set(other_token) == ({"5", "6"} if num_top else set())


@pytest.mark.parametrize(
    ("sampling", "code", "reason"),
    [
        ({"top_a": 0.5}, "INVALID_ARG", "top_a is not a sampling parameter that this model knows"),
        ({"guided_json": {"type": "object"}}, "INVALID_ARG", "guided_json is not a sampling parameter"),
        (
            {"lora_path": "/a"},
            "INVALID_ARG",
            "lora_path is no sampling parameter that chooses an adapter; send lora_name",
        ),
        ({"lora_task_id": None}, "INVALID_ARG", "lora_task_id is no sampling parameter"),
        ({"lora_name": ""}, "INVALID_ARG", "lora_name '' is not plain"),
        ({"lora_name": "../a"}, "INVALID_ARG", "lora_name '../a' is not plain"),
        ({"lora_name": 7}, "INVALID_ARG", "$.lora_name"),
        ({"temperature": -1}, "INVALID_ARG", "$.temperature"),
        ({"temperature": "hot"}, "INVALID_ARG", "$.temperature"),
        ({"temperature": "nan"}, "INVALID_ARG", "temperature"),
        ({"top_p": 0}, "INVALID_ARG", "$.top_p"),
        ({"max_tokens": 2**40}, "INVALID_ARG", "$.max_tokens"),
        ({"min_tokens": 17}, "INVALID_ARG", "min_tokens is 17"),
        ({"stop_token_ids": [-1]}, "INVALID_ARG", "$.stop_token_ids[0]"),
        ({"stop_token_ids": [2**40]}, "INVALID_ARG", "$.stop_token_ids[0]"),
        ({"logit_bias": {"x": 1}}, "INVALID_ARG", "logit_bias"),
        ({"logit_bias": {"7": "nan"}}, "INVALID_ARG", "the embedding bias of token 7 is nan"),
        ({"structured_outputs": "{"}, "INVALID_ARG", "structured_outputs cannot be read"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "INVALID_ARG", "structured_outputs has several of json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "UNSUPPORTED", "structural_tag"),
        ({"structured_outputs": {"foo": 1}}, "INVALID_ARG", "foo"),
        ({"skip_special_tokens": False}, "UNSUPPORTED", "sampling parameter skip_special_tokens False"),
        ({"detokenize": "false"}, "UNSUPPORTED", "sampling parameter detokenize 'false'"),
        ({"prompt_logprobs": 0}, "UNSUPPORTED", "sampling parameter prompt_logprobs 0"),
        ({"best_of": 2}, "UNSUPPORTED", "sampling parameter best_of 2"),
        ({"thinking_token_budget": 0}, "UNSUPPORTED", "sampling parameter thinking_token_budget 0"),
        ({"use_beam_search": True}, "UNSUPPORTED", "sampling parameter use_beam_search True"),
        ({"allowed_token_ids": [5]}, "UNSUPPORTED", "sampling parameter allowed_token_ids [5]"),
        ("[1]", "INVALID_ARG", "sampling_parameters must be a JSON object"),
        ("{", "INVALID_ARG", "sampling_parameters must be a JSON object"),
        ('{"a": ' + "[" * 900, "INVALID_ARG", "sampling"),
        ({"stop": "x" * 2000}, "INVALID_ARG", "bytes; a request may have 1000"),
        ({"stop": ""}, "INVALID_ARG", "stop cannot contain an empty string"),
        ({"stop": ["END", ""]}, "INVALID_ARG", "stop cannot contain an empty string"),
        ('{"stop": "\\ud800"}', "INVALID_ARG", "sampling_parameters must be a JSON object"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    front: VllmFront, engine: FakeEngine, sampling: Any, code: str, reason: str
) -> None:
    found, message = error_of(ask(front, sampling))
    assert (found, reason in message) == (code, True), message
    assert not engine.accepted


@pytest.mark.parametrize("name", ["stop", "lora_name", "bad_words", "structured_outputs", "other", "x\udc80"])
def test_a_parameter_that_is_half_a_character_is_refused(front: VllmFront, engine: FakeEngine, name: str) -> None:
    code, message = error_of(ask(front, parameters={name: "a\ud800"}))
    assert (code, "half of a character" in message) == ("INVALID_ARG", True), message
    assert not engine.accepted


def test_parameters_that_ask_for_nothing_are_taken(front: VllmFront, engine: FakeEngine) -> None:
    assert ask(front, {"use_beam_search": False, "unknown": None, "other": "", "temperature": None})[0].error is None
    assert engine.accepted


@pytest.mark.parametrize(
    ("tensors", "code", "reason"),
    [
        ({"stream": flag(), "sampling_parameters": text('{"n": 2}')}, "UNSUPPORTED", "n 2 together with stream"),
        ({"image": text("AAAA")}, "UNSUPPORTED", "image: this server has no images or videos"),
        ({"embedding_request": text("{}")}, "UNSUPPORTED", "embedding_request: this server has no embeddings"),
        ({"text_input": text("a", "b")}, "INVALID_ARG", "text_input has 2 values, expected one"),
    ],
)
def test_inputs_that_cannot_be_are_refused_by_name(
    front: VllmFront, tensors: dict[str, np.ndarray], code: str, reason: str
) -> None:
    found, message = error_of(ask(front, **tensors))
    assert (found, reason in message) == (code, True), message


@pytest.mark.parametrize(
    ("sampling", "parameters", "reason"),
    [
        ({"max_tokens": 3}, {"temperature": 0}, "temperature is 0 among the parameters of the request and None in"),
        ({"temperature": 1}, {"temperature": 0}, "temperature is 0 among the parameters of the request and 1 in"),
        ({"temperature": 0}, {"lora_name": "pirate"}, "lora_name is 'pirate' among the parameters"),
        (None, {"stream": True}, "this model has it as the input stream"),
        (None, {"streaming": "true"}, "this model has it as the input stream"),
        (None, {"sampling_param_max_tokens": 5}, "sampling_param_max_tokens is not a sampling parameter"),
        (None, {"return_log_probs": True}, "return_log_probs is not a sampling parameter"),
        (None, {"lora_task_id": 7}, "lora_task_id is no sampling parameter that chooses an adapter"),
    ],
)
def test_parameters_of_a_request_that_would_be_lost_are_refused_by_name(
    front: VllmFront, engine: FakeEngine, sampling: Any, parameters: dict[str, Any], reason: str
) -> None:
    code, message = error_of(ask(front, sampling, parameters))
    assert (code, reason in message) == ("INVALID_ARG", True), message
    assert not engine.accepted


def test_a_request_that_its_client_cancelled_ends(front: VllmFront, tokenizer: Tokenizer) -> None:
    request = FakeRequest({"text_input": text(tokenizer.decode([HOLD])), "stream": flag()}, output_names=OUTPUTS)
    front.accept(request)
    request.sender.cancelled.set()
    assert error_of(request.sender.wait())[0] == "CANCELLED"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["1", "0.5", "nan"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("7"), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sampling=st.dictionaries(st.sampled_from([*VllmSampling.__struct_fields__, "best_of", "top_a"]), VALUES))
def test_no_value_of_a_parameter_is_our_error(tokenizer: Tokenizer, sampling: dict[str, Any]) -> None:
    try:
        arrays = tensors_of(read_vllm_sampling(sampling), INFO, tokenizer)
        read_call(InputTensors.of(arrays | {"text_input": np.array([[b"Hello"]], object)}), INFO, tokenizer)
    except (InvalidRequest, Unsupported):
        pass


def test_deeply_nested_values_are_refused() -> None:
    value: Any = 1
    for _ in range(100):
        value = [value]
    with pytest.raises(InvalidRequest, match="temperature"):
        read_vllm_sampling({"temperature": value})
