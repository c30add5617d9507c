"""Each parameter of chats, most of which completions share: honoured, harmless, or refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
CHAT_PATH = "/v1/chat/completions"
SKY = {"type": "function", "function": {"name": "sky"}}
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
        ({"response_format": {"type": "json_object"}}, "guided_decoding_guide", '{"type": "object"}'),
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
        ({"logprobs": False, "top_logprobs": 0}, "return_log_probs", None),
        ({"top_k": 7}, "runtime_top_k", 7),
        ({"min_p": 0.25}, "min_p", 0.25),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"min_tokens": 2}, "min_tokens", 2),
        ({"min_tokens": 2}, "min_tokens_holds_stops", True),
        ({"top_k": -1}, "runtime_top_k", 0),
        ({"ignore_eos": True}, "end_id", -1),
        ({"stop_token_ids": [7]}, "stop_words_list", 7),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", True),
        ({"bad_words": ["sea"]}, "bad_words", "sea"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", 5),
        ({"truncate_prompt_tokens": -1, "max_tokens": 9}, "truncate_prompt_tokens", -1),
        ({"prompt_logprobs": 0}, "return_prompt_log_probs", True),
        ({"prompt_logprobs": 2}, "num_prompt_top_log_probs", 2),
        ({"priority": -3}, "priority", -3),
        ({"skip_special_tokens": True, "spaces_between_special_tokens": False}, "max_tokens", 2**31 - 1),
        ({"modalities": ["text"], "service_tier": "flex", "prediction": {"type": "content"}}, "max_tokens", 2**31 - 1),
        ({"stream_options": {"include_obfuscation": False}, "stream": True}, "streaming", True),
        ({"n": 2, "best_of": 2}, "num_return_sequences", 2),
        ({"add_special_tokens": True}, "add_special_tokens", True),
        ({}, "add_special_tokens", None),
        ({"no_stop_trim": True}, "include_stop_str_in_output", True),
        (
            {
                "detokenize": True,
                "use_beam_search": False,
                "length_penalty": 1,
                "early_stopping": False,
                "include_reasoning": False,
                "separate_reasoning": False,
                "stream_reasoning": True,
                "documents": [],
                "functions": [],
                "function_call": "none",
                "mm_processor_kwargs": {},
                "logits_processors": [],
                "vllm_xargs": {},
                "custom_params": {},
                "custom_labels": {"team": "a"},
                "return_token_ids": False,
                "return_hidden_states": False,
                "prompt_cache_options": {"ttl": "30m"},
                "allowed_token_ids": None,
                "cache_salt": None,
                "chat_template": None,
                "web_search_options": None,
            },
            "max_tokens",
            2**31 - 1,
        ),
    ],
)
def test_a_parameter_reaches_the_server(
    front: TestClient, server: Any, given: dict[str, Any], name: str, sent: Any
) -> None:
    answer = front.post(CHAT_PATH, json=CHAT | given)

    assert answer.status_code == 200, answer.text
    assert server.value(name) == sent


@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/completions", "/v1/responses"])
def test_a_bad_word_is_banned_at_the_beginning_and_after_a_space(front: TestClient, server: Any, path: str) -> None:
    """As vLLM does it, whichever of the two a client spells."""
    prompt = {CHAT_PATH: CHAT, "/v1/completions": {"model": "base", "prompt": "x"}}
    body = prompt.get(path, {"model": "base", "input": "x"})
    assert front.post(path, json=body | {"bad_words": ["up", " down", " "]}).status_code == 200
    assert server.values("bad_words") == ["up", " up", "down", " down", " "]


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
        ({"logit_bias": {"sea": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logprobs": 1}, "logprobs", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "function": {"name": "sky"}}}, "tool_choice", "invalid_value"),
        ({"tools": [SKY, SKY]}, "tools", "invalid_value"),
        ({"tools": [{"type": "custom", "custom": {"name": "sky"}}]}, "tools", "invalid_value"),
        ({"tools": [SKY], "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "invalid_value"),
        ({"tools": [SKY], "tool_choice": "required", "stop": "}"}, "stop", "invalid_value"),
        ({"store": True}, "store", "unsupported_value"),
        ({"made_up": 1}, "made_up", "unknown_parameter"),
        ({"detokenize": False}, "detokenize", "unsupported_value"),
        ({"use_beam_search": True}, "use_beam_search", "unsupported_value"),
        ({"length_penalty": 1.5}, "length_penalty", "unsupported_value"),
        ({"documents": [{"text": "a"}]}, "documents", "unsupported_value"),
        ({"functions": [{"name": "sky"}]}, "functions", "unsupported_value"),
        ({"function_call": {"name": "sky"}}, "function_call", "unsupported_value"),
        ({"best_of": 2}, "best_of", "unsupported_value"),
        ({"return_token_ids": True}, "return_token_ids", "unsupported_value"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "unsupported_value"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids", "unknown_parameter"),
        ({"cache_salt": "s"}, "cache_salt", "unknown_parameter"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "unknown_parameter"),
        ({"web_search_options": {}}, "web_search_options", "unknown_parameter"),
        ({"stop_regex": "a"}, "stop_regex", "unknown_parameter"),
        ({"request_id": "a", "rid": "b"}, "request_id", "invalid_value"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning_effort", "invalid_value"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning", "unknown_parameter"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "unsupported_value"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
        ({"echo": True}, "echo", "unsupported_value"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "unsupported_value"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens", "invalid_value"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "invalid_value",
        ),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": True}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
        ({"response_format": {"type": "grammar"}}, "response_format", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "pirate", "content": "hi"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "unsupported_value"),
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
    assert "Value error" not in error["message"]
    assert server.requests == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop": ["a"] * 17}, "stop: must have at most 16 items"),
        ({"stop": ""}, "stop: must not be empty"),
        ({"stop": ["a", ""]}, "stop.1: must not be empty"),
        ({"stop": 5}, "stop: must be a string or a list"),
        ({"stop": ["a", 5]}, "stop.1: must be a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages.0.content.0.type: image_url is not supported: this server reads text",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: must be a string or a list"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages.0.content.0: must be an object"),
        ({"tools": [SKY], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type: must be 'function'"),
        ({"tools": [SKY], "tool_choice": "sky"}, "tool_choice: must be 'none', 'auto' or 'required' or an object"),
        ({"guided_json": 5}, "guided_json: must be an object or a string"),
        ({"guided_json": "{"}, "guided_json: is not JSON: Expecting property name.*"),
        ({"best_of": 3, "n": 2}, r"best_of must be n \(2\): this server chooses no best of several answers"),
    ],
)
def test_a_field_of_several_types_is_refused_by_the_one_that_was_sent(
    front: TestClient, given: dict[str, Any], message: str
) -> None:
    error = front.post(CHAT_PATH, json=CHAT | given).json()["error"]
    assert re.fullmatch(message, error["message"]), error["message"]


def test_messages_become_what_chat_templates_know(front: TestClient, server: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "sky", "arguments": '{"day": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Ra"}, {"type": "text", "text": "in?"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "dry", "tool_call_id": "1"},
    ]
    front.post(CHAT_PATH, json=CHAT | {"messages": messages})

    assert server.chat() == [
        {"role": "system", "content": "Be brief."},
        messages[1],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call | {"function": {"name": "sky", "arguments": {"day": 1}}}],
        },
        messages[3],
    ]


def test_tools_go_to_the_template_as_they_are_unless_none_is_chosen(front: TestClient, server: Any) -> None:
    tools = [{"type": "function", "function": {"name": "sky", "x": 1, "parameters": {"properties": {"a": {}}}}}]

    front.post(CHAT_PATH, json=CHAT | {"tools": tools})
    assert server.chat() == {"messages": CHAT["messages"], "tools": tools}
    front.post(CHAT_PATH, json=CHAT | {"tools": tools, "tool_choice": "none"})
    assert server.chat() == CHAT["messages"]


def test_how_the_template_is_filled_in_goes_to_the_server(front: TestClient, server: Any) -> None:
    front.post(
        CHAT_PATH,
        json=CHAT
        | {
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
            "verbosity": "high",
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    )
    assert server.chat() == {
        "messages": CHAT["messages"],
        "chat_template_kwargs": {"reasoning_effort": "low", "verbosity": "high", "enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def test_the_effort_of_reasoning_has_two_names(front: TestClient, server: Any) -> None:
    for given in ({"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "low"}, "reasoning_effort": "low"}):
        front.post(CHAT_PATH, json=CHAT | given)
        assert server.chat()["chat_template_kwargs"] == {"reasoning_effort": "low"}


def test_a_request_id_is_in_the_answers_and_never_the_servers_own(front: TestClient, server: Any) -> None:
    """Two clients may choose the same one, and neither may end the other's request."""
    answers = [front.post(CHAT_PATH, json=CHAT | {name: "mine"}).json() for name in ("request_id", "rid")]

    assert [answer["id"] for answer in answers] == ["chatcmpl-mine"] * 2
    assert len({request.request_id for request in server.requests} | {"mine"}) == 3


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT_PATH, "messages"), ("/tokenize", "messages"), ("/v1/responses", "input")]
)
def test_a_chat_has_so_many_messages_since_all_callers_wait_while_they_are_read(
    front: TestClient, path: str, name: str
) -> None:
    fits, refused = ({"model": "base", name: CHAT["messages"] * number} for number in (1 << 14, (1 << 14) + 1))
    assert front.post(path, json=fits).status_code == 200
    answer = front.post(path, json=refused)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert "at most 16384 items" in answer.json()["error"]["message"]
