"""How likely tokens were, in OpenAI's two shapes, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from multilora_client.generation import Alternative, PromptTokens
from multilora_client.openai.replies.logprobs import (
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    joined_logprobs,
    prompt_logprobs,
    spell_id,
    spell_text,
)

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
COMPLETION = {"model": "base", "prompt": "hi", "logprobs": 2}

# "aé€" and the end: a, the first byte of é, the second and all of €, then a token without text.
TOKENS = [[b"a", b"a", b"b"], [b"\xc3", b"\xc3", b" x"], [b"\xa9\xe2\x82\xac", b"c", b"d"], [b"", b"", b"e"]]
LOG_PROBS = [-0.5, -1.0, -float("inf"), -0.25]
TOP = [[(1, -0.5), (2, -1.5)], [(3, -1.0), (4, -2.0)], [(5, -0.1), (6, -3.0)], [(0, -0.25), (7, -4.0)]]
ANSWER = Alternative("aé€", [1, 3, 9, 0], "stop", LOG_PROBS, TOP, tokens=TOKENS)


def entry(token: str, log_prob: float, text: bytes) -> dict[str, Any]:
    return {"token": token, "logprob": log_prob, "bytes": list(text)}


def test_a_chat_tells_each_token_with_its_bytes_and_rivals() -> None:
    assert chat_logprobs(ANSWER, spell_text) == {
        "content": [
            entry("a", -0.5, b"a") | {"top_logprobs": [entry("a", -0.5, b"a"), entry("b", -1.5, b"b")]},
            entry("bytes:\\xc3", -1.0, b"\xc3")
            | {"top_logprobs": [entry("bytes:\\xc3", -1.0, b"\xc3"), entry(" x", -2.0, b" x")]},
            entry("bytes:\\xa9\\xe2\\x82\\xac", -9999.0, b"\xa9\xe2\x82\xac")
            | {"top_logprobs": [entry("c", -0.1, b"c"), entry("d", -3.0, b"d")]},
        ],
        "refusal": None,
    }
    assert (
        b"".join(bytes(token["bytes"]) for token in chat_logprobs(ANSWER, spell_text)["content"]).decode()
        == ANSWER.text
    )


def test_a_completion_tells_every_token_with_its_place_and_its_rivals_beside_it() -> None:
    assert completion_logprobs(ANSWER, TextOffsets(), 2, spell_text) == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9\\xe2\\x82\\xac", ""],
        "token_logprobs": [-0.5, -1.0, -9999.0, -0.25],
        "top_logprobs": [
            {"a": -0.5, "b": -1.5},
            {"bytes:\\xc3": -1.0, " x": -2.0},
            {"c": -0.1, "d": -3.0, "bytes:\\xa9\\xe2\\x82\\xac": -9999.0},
            {"": -0.25, "e": -4.0},
        ],
        "text_offset": [0, 1, 1, 3],
    }


def test_without_rivals_only_the_tokens_themselves_are_told() -> None:
    answer = Alternative("a", [1], "stop", [-0.5], [], tokens=[[b"a"]])
    assert chat_logprobs(answer, spell_text)["content"] == [entry("a", -0.5, b"a") | {"top_logprobs": []}]
    assert completion_logprobs(answer, TextOffsets(), 0, spell_text)["top_logprobs"] is None


def test_of_tokens_spelled_alike_the_likeliest_is_told() -> None:
    answer = Alternative("a", [1], "stop", [-0.5], [[(1, -0.5), (2, -1.0)]], tokens=[[b"a", b"", b""]])
    assert completion_logprobs(answer, TextOffsets(), 2, spell_text)["top_logprobs"] == [{"": -0.5, "a": -0.5}]


PROMPT = PromptTokens(
    [0, 1, 2],
    [[b"<s>"], [b"a", b"a", b"b"], [b"\xff", b"c", b"d"]],
    [0.0, -0.5, -float("inf")],
    [[], [(1, -0.5), (5, -1.5)], [(6, -0.1), (7, -0.2)]],
)


def test_a_prompt_has_nothing_before_its_first_token() -> None:
    assert completion_logprobs(PROMPT, TextOffsets(), 1, spell_text) == {
        "tokens": ["<s>", "a", "bytes:\\xff"],
        "token_logprobs": [None, -0.5, -9999.0],
        "top_logprobs": [None, {"a": -0.5}, {"c": -0.1, "bytes:\\xff": -9999.0}],
        "text_offset": [0, 3, 4],
    }
    assert completion_logprobs(PROMPT, TextOffsets(), 0, spell_text)["top_logprobs"] is None


def test_a_prompt_and_its_answer_are_one_list_whose_places_go_on() -> None:
    offsets = TextOffsets()
    parts = [completion_logprobs(part, offsets, 0, spell_id) for part in (PROMPT, ANSWER)]

    joined = joined_logprobs(*parts)
    assert joined is not None
    assert joined["tokens"] == [f"token_id:{token_id}" for token_id in [0, 1, 2, 1, 3, 9, 0]]
    assert joined["token_logprobs"] == [None, -0.5, -9999.0, -0.5, -1.0, -9999.0, -0.25]
    assert joined["text_offset"] == [0, 3, 4, 5, 6, 6, 8]
    assert joined["top_logprobs"] is None
    assert joined_logprobs(None, parts[0]) == parts[0] == joined_logprobs(parts[0], None)


def test_vllms_prompt_logprobs_are_by_token_id_with_ranks() -> None:
    def entry(log_prob: float, rank: int | None, text: str) -> dict[str, Any]:
        return {"logprob": log_prob, "rank": rank, "decoded_token": text}

    assert prompt_logprobs(PROMPT, 2) == [
        None,
        {"1": entry(-0.5, 1, "a"), "5": entry(-1.5, 2, "b")},
        {"2": entry(-9999.0, None, "�"), "6": entry(-0.1, 1, "c"), "7": entry(-0.2, 2, "d")},
    ]


@pytest.fixture
def one_token_a_response(server: Any) -> None:
    """Each response has the token `a` and its rival, a token that is no character."""
    server.outputs = {
        "sequence_length": [1],
        "output_ids": [5],
        "cum_log_probs": np.array([-0.5], np.float32),
        "output_log_probs": np.array([-0.5], np.float32),
        "top_log_prob_ids": [5, 6],
        "top_log_probs": np.array([-0.5, -2.0], np.float32),
        "output_tokens": ["a", "a", b"\xff".decode("latin-1")],
    }


@pytest.mark.usefixtures("one_token_a_response")
def test_an_answer_has_them_when_they_are_asked_for(front: TestClient) -> None:
    rivals = [entry("a", -0.5, b"a"), entry("bytes:\\xff", -2.0, b"\xff")]
    chat = front.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["logprobs"]
    assert chat == {"content": [entry("a", -0.5, b"a") | {"top_logprobs": rivals}], "refusal": None}
    assert (
        front.post("/v1/chat/completions", json=CHAT | {"logprobs": False, "top_logprobs": None}).json()["choices"][0][
            "logprobs"
        ]
        is None
    )


@pytest.mark.usefixtures("one_token_a_response")
def test_a_stream_counts_the_places_on_and_has_tokens_without_text_of_their_own(front: TestClient) -> None:
    lines = front.post("/v1/completions", json=COMPLETION | {"stream": True}).text.split("\n\n")
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [body["choices"][0] for body in bodies]
    assert [choice["text"] for choice in choices] == ["Ahoy", "", ", ", "café", ""]
    assert [choice["logprobs"]["text_offset"] for choice in choices[:-1]] == [[0], [1], [2], [3]]
    assert choices[-1]["logprobs"] is None
