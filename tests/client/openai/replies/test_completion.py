"""Completions of several prompts, and of prompts that are part of the answer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
from fastapi.testclient import TestClient

from multilora_client import Unavailable

PATH = "/v1/completions"
PROMPT_OUTPUTS: dict[str, Any] = {
    "prompt_ids": [0, 3, 4],
    "prompt_log_probs": np.array([0.0, -0.5, -1.5], np.float32),
    "prompt_top_log_prob_ids": [0, 3, 9],
    "prompt_top_log_probs": np.array([0.0, -0.5, -0.25], np.float32),
    "prompt_tokens": ["<s>", "", "I", "I", " am", " sea"],
}
ANSWER_OUTPUTS: dict[str, Any] = {
    "sequence_length": [2],
    "output_ids": [5, 1],
    "cum_log_probs": np.array([-1.0], np.float32),
    "output_log_probs": np.array([-0.75, -0.25], np.float32),
    "top_log_prob_ids": [5, 1],
    "top_log_probs": np.array([-0.75, -0.25], np.float32),
    "output_tokens": ["!", "!", "", ""],
}


@pytest.mark.parametrize("prompts", [["one", "two", "three"], [[5], [6, 7], [8]]])
def test_several_prompts_have_choices_of_their_own(front: TestClient, server: Any, prompts: Any) -> None:
    answer = front.post(PATH, json={"model": "pirate", "prompt": prompts, "n": 2}).json()

    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert {choice["text"] for choice in answer["choices"]} == {"Ahoy, café"}
    assert answer["usage"] == {"prompt_tokens": 21, "completion_tokens": 6, "total_tokens": 27}
    assert len({request.request_id for request in server.requests}) == 3
    assert {request.inputs["lora_task_id"].data for request in server.requests} == {(7).to_bytes(8, "little")}


def test_choices_are_in_the_order_of_their_prompts(front: TestClient, server: Any) -> None:
    """Whichever answer comes first."""
    prompts = [f"{number}" for number in range(50)]
    texts = {}
    answer_of = server._answer

    def answer(request: Any) -> Any:
        server.pieces = [f"after {len(texts)}"]
        texts[len(texts)] = bytes(request.inputs["text_input"].data[4:]).decode()
        return answer_of(request)

    server._answer = answer
    choices = front.post(PATH, json={"model": "base", "prompt": prompts}).json()["choices"]
    told = {int(choice["text"].removeprefix("after ")): prompts[choice["index"]] for choice in choices}
    assert told == texts


def test_several_prompts_are_streamed_side_by_side(user: openai.OpenAI) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    *events, usage = user.completions.create(model="base", prompt=["one", "two"], **options)

    texts = ["".join(e.choices[0].text for e in events if e.choices[0].index == index) for index in range(4)]
    reasons = [[e.choices[0].finish_reason for e in events if e.choices[0].index == index][-1] for index in range(4)]
    assert texts == ["Ahoy, café"] * 4
    assert reasons == ["stop"] * 4
    assert usage.usage is not None
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (14, 16)


@pytest.mark.parametrize("stream", [False, True])
def test_the_failure_of_one_prompt_is_that_of_all(front: TestClient, server: Any, stream: bool) -> None:
    answer = server._answer
    server._answer = lambda request: (_ for _ in ()).throw(Unavailable("full")) if server.requests else answer(request)
    body = {"model": "base", "prompt": ["one", "two", "three"], "stream": stream}
    response = front.post(PATH, json=body)

    _, _, last = response.text.strip().rpartition("\n\n")  # the whole body, where it failed before the first event
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"


def test_an_echo_begins_with_the_prompt(front: TestClient) -> None:
    body = {"model": "base", "prompt": ["I am", "You are"], "echo": True}
    assert [choice["text"] for choice in front.post(PATH, json=body).json()["choices"]] == [
        "I amAhoy, café",
        "You areAhoy, café",
    ]


def test_an_echo_of_token_ids_is_spelled_by_the_server(front: TestClient, server: Any) -> None:
    server.outputs = PROMPT_OUTPUTS
    body = {"model": "base", "prompt": [0, 3, 4], "echo": True}
    assert front.post(PATH, json=body).json()["choices"][0]["text"] == "<s>I amAhoy, café"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_of_an_echo_have_a_place_for_every_token_of_prompt_and_answer(
    front: TestClient, server: Any, stream: bool
) -> None:
    """One for one with the token ids, special ones included: evaluations count on it."""
    server.outputs, server.pieces = PROMPT_OUTPUTS | ANSWER_OUTPUTS, ["!"]
    body = {"model": "base", "prompt": "I am", "echo": True, "logprobs": 1, "stream": stream}
    answer = front.post(PATH, json=body)
    choices = (
        [json.loads(event.removeprefix("data: "))["choices"][0] for event in answer.text.split("\n\n")[:-2]]
        if stream
        else answer.json()["choices"]
    )
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    joined = {name: [value for part in told for value in part[name]] for name in told[0]}

    assert "".join(choice["text"] for choice in choices) == "I am!"
    assert joined == {
        "tokens": ["<s>", "I", " am", "!", ""],
        "token_logprobs": [None, -0.5, -1.5, -0.75, -0.25],
        "top_logprobs": [None, {"I": -0.5}, {" sea": -0.25, " am": -1.5}, {"!": -0.75}, {"": -0.25}],
        "text_offset": [0, 3, 4, 7, 8],
    }


def test_log_probs_of_the_prompt_alone_need_no_answer(front: TestClient, server: Any) -> None:
    server.outputs, server.pieces, server.finish_reason = PROMPT_OUTPUTS, [""], "length"
    body = {"model": "base", "prompt": "I am", "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = front.post(PATH, json=body).json()["choices"]

    assert server.value("max_tokens") == 0
    assert (choice["text"], choice["finish_reason"]) == ("I am", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -1.5]


def test_tokens_are_told_by_their_ids_when_that_is_wanted(front: TestClient, server: Any) -> None:
    server.outputs, server.pieces = PROMPT_OUTPUTS | ANSWER_OUTPUTS, ["!"]
    options = {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = front.post(PATH, json={"model": "base", "prompt": "I am"} | options).json()["choices"]

    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in (0, 3, 4, 5, 1)]
    assert choice["logprobs"]["top_logprobs"][2] == {"token_id:9": -0.25, "token_id:4": -1.5}


def test_vllms_prompt_logprobs_are_in_the_choice(front: TestClient, server: Any) -> None:
    server.outputs = PROMPT_OUTPUTS
    (choice,) = front.post(PATH, json={"model": "base", "prompt": "I am", "prompt_logprobs": 1}).json()["choices"]

    assert choice["text"] == "Ahoy, café"
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][2] == {
        "4": {"logprob": -1.5, "rank": None, "decoded_token": " am"},
        "9": {"logprob": -0.25, "rank": 1, "decoded_token": " sea"},
    }
