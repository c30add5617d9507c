"""Requests of NVIDIA's LLM API recipe: what `generation` is asked in their place, and how the answers look."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters import TINY, wire_adapter
from support.fake_engine import HOLD, INFO, FakeEngine, text_of
from support.fake_triton import FakeRequest, FakeResponse
from support.served_engine import served

from multilora_engine.lora.format import pack_adapter
from multilora_engine.request import SamplingParams
from multilora_engine.serving.front import EngineLink
from multilora_engine.serving.llmapi import LlmapiFront
from multilora_engine.text.tokenizer import Tokenizer

OUTPUTS = (
    "text_output",
    "finish_reason",
    "stop_reason",
    "cumulative_logprob",
    "kv_cache_reused_block",
    "kv_cache_hit_rate",
    "arrival_time_ns",
    "acceptance_rate",
)
PROMPT = "Hello there"


@pytest.fixture
def engine(tmp_path: Path, default_model_dir: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine()
    engine.info = dataclasses.replace(INFO, tokenizer_path=str(default_model_dir), vocab_size=49152)
    with served(engine, tmp_path / "engine.sock"):
        yield engine


@pytest.fixture
def front(link: EngineLink) -> Iterator[LlmapiFront]:
    front = LlmapiFront(link, can_stream=True)
    yield front
    front.close()


def text(*texts: str) -> np.ndarray:
    return np.array([text.encode() for text in texts], np.object_)


def real(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def integer(value: int) -> np.ndarray:
    return np.array([value], np.int32)


def flag(value: bool = True) -> np.ndarray:
    return np.array([value])


def adapter(path: str, task_id: int = 7) -> dict[str, np.ndarray]:
    return {"lora_id": np.array([task_id], np.uint64), "lora_name": text("a label"), "lora_path": text(path)}


def ask(front: LlmapiFront, **more: Any) -> list[FakeResponse]:
    """All responses to a prompt with further tensors. id, own_parameters: of the request."""
    request = {name: more.pop(name) for name in ("id", "own_parameters", "output_names") if name in more}
    fake = FakeRequest({"text_input": text(PROMPT)} | more, **{"output_names": OUTPUTS, **request})
    front.accept(fake)
    return fake.sender.wait()


def error_of(responses: list[FakeResponse]) -> tuple[str, str]:
    (response,) = responses
    assert response.error is not None
    return response.error.code, response.error.message


def sampling_of(engine: FakeEngine) -> SamplingParams:
    return engine.accepted[-1].sampling


def test_a_prompt_alone_gets_32_tokens_after_it(front: LlmapiFront, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT, add_special_tokens=True)
    (response,) = ask(front)
    assert list(response.arrays) == ["text_output"]
    assert response.arrays["text_output"].shape == (1,)
    answer = "".join(text_of(prompt[i % len(prompt)]) for i in range(32))
    assert response.texts() == [PROMPT + answer]
    (response,) = ask(front, sampling_param_exclude_input_from_output=flag(), sampling_param_max_tokens=integer(2))
    assert response.texts() == [text_of(prompt[0]) + text_of(prompt[1])]
    assert sampling_of(engine).is_greedy


def test_each_response_of_a_stream_has_the_whole_text_so_far(front: LlmapiFront) -> None:
    (whole,) = ask(front, sampling_param_exclude_input_from_output=flag())
    parts = [response.texts()[0] for response in ask(front, streaming=flag())]
    assert len(parts) > 1
    assert parts[-1] == whole.texts()[0]
    assert all(later.startswith(earlier) and later != earlier for earlier, later in pairwise(parts))


@pytest.mark.parametrize(
    ("given", "top_k", "temperature", "top_p", "is_greedy"),
    [
        ({}, 1, 1.0, 1.0, True),
        ({"temperature": real(0.0)}, 1, 0.0, 1.0, True),
        ({"temperature": real(1.0)}, 0, 1.0, 1.0, False),
        ({"temperature": real(0.5)}, 0, 0.5, 1.0, False),
        ({"top_k": integer(0)}, 0, 1.0, 1.0, False),
        ({"top_k": integer(1), "temperature": real(0.5)}, 1, 0.5, 1.0, True),
        ({"top_k": integer(9)}, 9, 1.0, 1.0, False),
        ({"top_p": real(0.5)}, 0, 1.0, 0.5, False),
        ({"top_p": real(0.0), "temperature": real(2.0)}, 1, 2.0, 1.0, True),
    ],
)
def test_an_answer_is_drawn_exactly_where_the_llm_api_draws_it(
    front: LlmapiFront,
    engine: FakeEngine,
    given: dict[str, np.ndarray],
    top_k: int,
    temperature: float,
    top_p: float,
    is_greedy: bool,
) -> None:
    ask(front, **{f"sampling_param_{name}": value for name, value in given.items()})
    sampling = sampling_of(engine)
    assert (sampling.top_k, sampling.temperature, sampling.top_p) == (top_k, temperature, top_p)
    assert sampling.is_greedy == is_greedy


def test_other_options_are_those_of_generation(front: LlmapiFront, engine: FakeEngine) -> None:
    ask(
        front,
        sampling_param_max_tokens=integer(3),
        sampling_param_seed=np.array([2**63], np.uint64),
        sampling_param_frequency_penalty=real(0.25),
        sampling_param_presence_penalty=real(0.5),
        sampling_param_stop=text("END", "\n\n", ""),
        sampling_param_best_of=integer(1),
    )
    sampling = sampling_of(engine)
    assert (sampling.max_tokens, sampling.seed) == (3, 2**63)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.25, 0.5)
    assert sampling.stop_words == ("END", "\n\n")


def test_what_is_told_beside_the_text_are_strings_that_were_asked_for(front: LlmapiFront) -> None:
    told = {"return_finish_reason": flag(), "return_stop_reason": flag(), "return_cumulative_logprob": flag()}
    *parts, last = ask(front, streaming=flag(), sampling_param_max_tokens=integer(3), **told)
    for response in (*parts, last):
        assert all(array.shape == (1,) and array.dtype == np.object_ for array in response.arrays.values())
        assert response.arrays["stop_reason"].tolist() == [b"None"]
        assert float(response.arrays["cumulative_logprob"][0]) == 0.0
    assert [part.arrays["finish_reason"].tolist() for part in parts] == [[b"None"]] * len(parts)
    assert last.arrays["finish_reason"].tolist() == [b"length"]
    (response,) = ask(front, return_finish_reason=flag(False))
    assert list(response.arrays) == ["text_output"]
    (response,) = ask(front, **told, output_names=("text_output", "finish_reason"))
    assert list(response.arrays) == ["text_output", "finish_reason"]


def test_performance_metrics_are_strings(front: LlmapiFront) -> None:
    (response,) = ask(front, sampling_param_return_perf_metrics=flag())
    values = {name: array.tolist() for name, array in response.arrays.items() if name != "text_output"}
    assert values == {
        "kv_cache_reused_block": [b"0"],
        "kv_cache_hit_rate": [b"0.0"],
        "arrival_time_ns": [b"0"],
        "acceptance_rate": [b"0.0"],
    }


def endless(tokenizer: Tokenizer) -> np.ndarray:
    """A prompt that the engine never answers."""
    prompt = tokenizer.decode([HOLD])
    assert tokenizer.encode(prompt, add_special_tokens=True) == [HOLD]
    return text(prompt)


def test_a_stop_and_what_it_stops_are_cancelled(front: LlmapiFront, tokenizer: Tokenizer) -> None:
    stop = {"text_input": np.empty([1], np.bytes_), "stop": flag()}
    cancelled = ("CANCELLED", "[CANCELLED] Request cancelled by client (request a)")
    assert error_of(ask(front, **stop, id="a")) == cancelled, "of an id that nobody uses"
    unending = endless(tokenizer)
    for is_streaming in (True, False):
        original = FakeRequest({"text_input": unending, "streaming": flag(is_streaming)}, id="a")
        front.accept(original)
        assert error_of(ask(front, **stop, id="a")) == cancelled
        assert error_of(original.sender.wait()) == cancelled
    code, message = error_of(ask(front, **stop))
    assert code == "INVALID_ARG"
    assert "A request id must be provided for request cancellation" in message


def test_a_model_that_sends_one_response_refuses_to_stream(link: EngineLink) -> None:
    front = LlmapiFront(link, can_stream=False)
    code, message = error_of(ask(front, streaming=flag()))
    front.close()
    assert code == "INVALID_ARG"
    assert "Streaming is only supported in decoupled mode." in message


def test_an_adapter_is_asked_for_by_its_id_and_its_path(front: LlmapiFront, engine: FakeEngine) -> None:
    wire = wire_adapter(TINY, [(1, 0, 4)])
    engine.put_adapter(7, pack_adapter(wire.weights, wire.config, TINY))
    (response,) = ask(front, **adapter("/adapters/pirate"), lora_ckpt_source=text("hf"))
    assert response.error is None
    request = engine.accepted[-1]
    assert (request.lora_task_id, request.lora_path, request.lora_name) == (7, "/adapters/pirate", "")


@pytest.mark.parametrize(
    ("tensors", "code", "reason"),
    [
        (
            {"lora_id": np.array([7], np.uint64)},
            "INVALID_ARG",
            "must all be provided together; the request has lora_id",
        ),
        (
            {"lora_path": text("/a"), "lora_name": text("a")},
            "INVALID_ARG",
            "lora_id, lora_name, and lora_path must all",
        ),
        ({"lora_ckpt_source": text("hf")}, "INVALID_ARG", "must all be provided together"),
        ({**adapter("/a"), "lora_ckpt_source": text("nemo")}, "UNSUPPORTED", "lora_ckpt_source nemo"),
        ({**adapter("/a"), "lora_ckpt_source": text("x")}, "INVALID_ARG", "must be one of ('hf', 'nemo'), got 'x'"),
        (adapter(""), "INVALID_ARG", "lora_path has 0 bytes, expected 1 .. 4096"),
        (adapter("/" * 5000), "INVALID_ARG", "lora_path has 5000 bytes"),
        (adapter("/a") | {"lora_path": np.array([b"\xff"], object)}, "INVALID_ARG", "lora_path is not valid UTF-8"),
        (
            {"text_input": text("a", "b")},
            "INVALID_ARG",
            "text_input has 2 texts; a request of this model has one prompt",
        ),
        ({"text_input": text()}, "INVALID_ARG", "text_input has 0 texts"),
        (
            {"sampling_param_max_tokens": np.array([1, 2], np.int32)},
            "INVALID_ARG",
            "Expected a scalar tensor for tensor",
        ),
        ({"sampling_param_temperature": real(-1.0)}, "INVALID_ARG", "temperature is -1.0"),
        (
            {"sampling_param_top_p": real(-0.5)},
            "INVALID_ARG",
            "sampling_param_top_p is -0.5, expected a number in [0, 1]",
        ),
        ({"sampling_param_best_of": integer(2)}, "UNSUPPORTED", "sampling_param_best_of 2"),
        ({"image_url": text("data:,")}, "UNSUPPORTED", "image_url: this server has no images or videos"),
        ({"sampling_param_logits_post_processor_name": text("x")}, "UNSUPPORTED", "has no logits processors"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    front: LlmapiFront, engine: FakeEngine, tensors: dict[str, np.ndarray], code: str, reason: str
) -> None:
    found, message = error_of(ask(front, **tensors))
    assert found == code
    assert reason in message
    assert not engine.accepted


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"max_tokens": 5}, "which has it as sampling_param_max_tokens"),
        ({"temperature": 0.5}, "which has it as sampling_param_temperature"),
        ({"top_p": 0.5}, "which has it as sampling_param_top_p"),
        ({"stop_words": "x"}, "which has it as sampling_param_stop"),
        ({"stream": True}, "which has it as streaming"),
        ({"lora_task_id": 7}, "send the input lora_id, lora_name and lora_path"),
        (
            {"sampling_parameters": "{}x"},
            "sampling_parameters is a parameter of the request and no input of this model",
        ),
    ],
)
def test_requests_of_other_protocols_are_refused_by_name(
    front: LlmapiFront, engine: FakeEngine, parameters: dict[str, Any], reason: str
) -> None:
    code, message = error_of(ask(front, own_parameters=parameters))
    assert code == "INVALID_ARG"
    assert reason in message
    assert not engine.accepted


def test_the_parameter_of_nvidias_client_changes_nothing(front: LlmapiFront) -> None:
    (response,) = ask(front, own_parameters={"Streaming": True, "triton_enable_empty_final_response": True})
    assert response.error is None


def test_a_request_that_its_client_cancelled_ends(front: LlmapiFront, tokenizer: Tokenizer) -> None:
    request = FakeRequest({"text_input": endless(tokenizer)})
    front.accept(request)
    request.sender.cancelled.set()
    assert error_of(request.sender.wait())[0] == "CANCELLED"


@pytest.mark.parametrize("digest", ["ab" * 16, ""])
def test_the_digest_that_the_adapter_must_have_is_a_parameter_of_the_request(
    front: LlmapiFront, engine: FakeEngine, digest: str
) -> None:
    wire = wire_adapter(TINY, [(1, 0, 4)])
    engine.put_adapter(7, pack_adapter(wire.weights, wire.config, TINY))
    (response,) = ask(front, **adapter("/adapters/pirate"), own_parameters={"lora_expected_digest": digest})
    if digest:
        assert engine.accepted[-1].lora_expected_digest == digest
    else:
        assert error_of([response]) == ("INVALID_ARG", response.error.message)
        assert not engine.accepted
