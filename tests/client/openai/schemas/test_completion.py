"""Parameters of completions that chats do not have, and prompts of all kinds."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

COMPLETION = {"model": "base", "prompt": "hi"}
PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"best_of": 2}, "best_of", "unsupported_value"),
        ({"best_of": 2, "n": 3}, "best_of", "unsupported_value"),
        ({"suffix": "."}, "suffix", "unsupported_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"prompt": ["hi"] * 17, "n": 128}, "prompt", "invalid_value"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "invalid_value"),
        ({"messages": []}, "messages", "unknown_parameter"),
    ],
)
def test_what_completions_cannot_do_is_refused_by_name(
    front: TestClient, given: dict[str, Any], param: str, code: str
) -> None:
    answer = front.post(PATH, json=COMPLETION | given)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)


@pytest.mark.parametrize(
    ("given", "name", "sent"),
    [
        ({}, "max_tokens", 16),
        ({}, "return_prompt_log_probs", None),
        ({"logprobs": 0}, "return_log_probs", True),
        ({"logprobs": 0}, "num_top_log_probs", None),
        ({"logprobs": 5}, "num_top_log_probs", 5),
        ({"n": 2, "best_of": 2}, "num_return_sequences", 2),
        ({"max_tokens": 0, "echo": True}, "max_tokens", 0),
        ({"add_special_tokens": False}, "add_special_tokens", False),
        ({"add_special_tokens": True}, "add_special_tokens", True),
        ({"add_special_tokens": False, "prompt": [5, 6]}, "add_special_tokens", None),
        ({}, "add_special_tokens", None),
        ({"echo": True}, "return_prompt_log_probs", None),
        ({"echo": True, "logprobs": 0}, "return_prompt_log_probs", True),
        ({"echo": True, "logprobs": 3}, "num_prompt_top_log_probs", 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 4}, "num_prompt_top_log_probs", 4),
        ({"prompt_logprobs": 2, "max_tokens": 0}, "num_prompt_top_log_probs", 2),
        ({"echo": True, "prompt": [5, 6]}, "return_prompt_log_probs", True),
        ({"echo": True, "truncate_prompt_tokens": 2}, "return_prompt_log_probs", True),
    ],
)
def test_a_parameter_of_completions_reaches_the_server(
    front: TestClient, server: Any, given: dict[str, Any], name: str, sent: Any
) -> None:
    server.outputs = {"output_tokens": []}
    front.post(PATH, json=COMPLETION | given)

    assert server.value(name) == sent


@pytest.mark.parametrize(
    ("prompt", "name", "sent"),
    [
        ("hi", "text_input", ["hi"]),
        (["hi"], "text_input", ["hi"]),
        ("", "text_input", [""]),
        ([5, 6], "input_ids", [5, 6]),
        ([[5, 6]], "input_ids", [5, 6]),
    ],
)
def test_a_prompt_is_text_or_token_ids(front: TestClient, server: Any, prompt: Any, name: str, sent: Any) -> None:
    front.post(PATH, json=COMPLETION | {"prompt": prompt})

    assert server.values(name) == sent


@pytest.mark.parametrize("prompt", [[], [[]], [1.5], {}, [None], [5, "a"], ["a", 5], [2**31], [[True]], 5])
def test_what_is_no_prompt_is_refused(front: TestClient, prompt: Any) -> None:
    answer = front.post(PATH, json=COMPLETION | {"prompt": prompt})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "prompt", "invalid_value")
    assert error["message"].startswith("prompt: must be a text, a list of texts, a list of token ids, or a list of")
