"""Each parameter: honoured, harmless, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "base", "prompt": "hi"}
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "name", "sent"),
    [
        ({}, "temperature", 1.0),
        ({}, "runtime_top_p", 1.0),
        ({}, "seed", None),
        ({}, "max_tokens", 2**31 - 1),
        ({}, "guided_decoding_guide_type", None),
        ({"temperature": None, "n": None, "made_up": None}, "temperature", 1.0),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_p": 0.25}, "runtime_top_p", 0.25),
        ({"top_p": 0}, "temperature", 0.0),
        ({"temperature": 0, "top_p": 0.5}, "temperature", 0.0),
        ({"temperature": 0, "top_p": 0.5}, "runtime_top_p", None),
        ({"seed": 5}, "seed", 5),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"max_tokens": 9}, "max_tokens", 9),
        ({"max_completion_tokens": 8}, "max_tokens", 8),
        ({"stop": "END"}, "stop_words", "END"),
        ({"stop": ["END", "x"]}, "stop_words", "END"),
        ({"stop": []}, "stop_words", None),
        ({"response_format": {"type": "text"}}, "guided_decoding_guide_type", None),
        ({"response_format": {"type": "json_object"}}, "guided_decoding_guide_type", "json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            "guided_decoding_guide",
            json.dumps(SCHEMA),
        ),
        ({"n": 3}, "num_return_sequences", 3),
        ({"n": 1}, "num_return_sequences", None),
        ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
        ({"frequency_penalty": -2}, "frequency_penalty", -2.0),
        ({"user": "u", "metadata": {"a": "b"}, "store": False, "n": 1, "logit_bias": {}}, "max_tokens", 2**31 - 1),
        ({"logit_bias": {"5": -100}}, "embedding_bias_ids", 5),
        ({"logit_bias": {"5": -100}}, "embedding_bias_weights", -100.0),
        ({"logprobs": True}, "return_log_probs", True),
        ({"logprobs": True}, "num_top_log_probs", None),
        ({"logprobs": True, "top_logprobs": 3}, "num_top_log_probs", 3),
        ({"logprobs": False}, "return_log_probs", None),
        ({"top_k": 7}, "runtime_top_k", 7),
        ({"min_p": 0.25}, "min_p", 0.25),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"min_tokens": 2}, "min_tokens", 2),
    ],
)
def test_a_parameter_reaches_the_server(
    front: TestClient, server: Any, given: dict[str, Any], name: str, sent: Any
) -> None:
    answer = front.post(CHAT_PATH, json=CHAT | given)

    assert answer.status_code == 200, answer.text
    assert server.value(name) == sent


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"n": 2, "stream": True}, None, "unsupported_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
        ({"logit_bias": {"sea": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
        ({"top_logprobs": 2}, None, "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logprobs": 1}, "logprobs", "invalid_value"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_value"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_value"),
        ({"store": True}, "store", "unsupported_value"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unknown_parameter"),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": True}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, None, "invalid_value"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, None, "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
        ({"response_format": {"type": "grammar"}}, "response_format", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "pirate", "content": "hi"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "invalid_value"),
        ({"model": None}, "model", "invalid_value"),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_refused_by_name(
    front: TestClient, server: Any, given: dict[str, Any], param: str | None, code: str
) -> None:
    answer = front.post(CHAT_PATH, json=CHAT | given)

    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    assert param is None or param in error["message"]
    assert server.requests == []


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"best_of": 2}, None),
        ({"best_of": 2, "n": 3}, None),
        ({"echo": True}, "echo"),
        ({"suffix": "."}, "suffix"),
        ({"prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_what_completions_cannot_do_is_refused_by_name(front: TestClient, given: dict[str, Any], param: str) -> None:
    answer = front.post(COMPLETION_PATH, json=COMPLETION | given)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "unsupported_value")


@pytest.mark.parametrize(
    ("given", "name", "sent"),
    [
        ({"logprobs": 0}, "return_log_probs", True),
        ({"logprobs": 0}, "num_top_log_probs", None),
        ({"logprobs": 5}, "num_top_log_probs", 5),
        ({"n": 2, "best_of": 2}, "num_return_sequences", 2),
    ],
)
def test_a_parameter_of_completions_reaches_the_server(
    front: TestClient, server: Any, given: dict[str, Any], name: str, sent: Any
) -> None:
    server.outputs = {"text_output": ["a", "b"]} if "n" in given else {}
    server.outputs |= {"finish_reason": ["stop"] * len(server.outputs.get("text_output", "a"))}
    answer = front.post(COMPLETION_PATH, json=COMPLETION | given)

    assert answer.status_code == 200, answer.text
    assert server.value(name) == sent


@pytest.mark.parametrize(
    ("prompt", "name", "sent"),
    [("hi", "text_input", "hi"), (["hi"], "text_input", "hi"), ([5, 6], "input_ids", 5), ([[5, 6]], "input_ids", 5)],
)
def test_a_prompt_is_text_or_token_ids(front: TestClient, server: Any, prompt: Any, name: str, sent: Any) -> None:
    front.post(COMPLETION_PATH, json=COMPLETION | {"prompt": prompt})

    assert server.value(name) == sent


@pytest.mark.parametrize("prompt", [[], [[]], [1.5], {}, [None]])
def test_what_is_no_prompt_is_refused(front: TestClient, prompt: Any) -> None:
    answer = front.post(COMPLETION_PATH, json=COMPLETION | {"prompt": prompt})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_messages_become_what_chat_templates_know(front: TestClient, server: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "sky", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Ra"}, {"type": "text", "text": "in?"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "dry", "tool_call_id": "1"},
    ]
    front.post(CHAT_PATH, json=CHAT | {"messages": messages})

    assert json.loads(server.value("messages")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        messages[3],
    ]


def test_tools_go_to_the_template_unless_none_is_chosen(front: TestClient, server: Any) -> None:
    tools = [{"type": "function", "function": {"name": "sky"}}]

    front.post(CHAT_PATH, json=CHAT | {"tools": tools})
    assert json.loads(server.value("messages")) == {"messages": CHAT["messages"], "tools": tools}
    front.post(CHAT_PATH, json=CHAT | {"tools": tools, "tool_choice": "none"})
    assert json.loads(server.value("messages")) == CHAT["messages"]
