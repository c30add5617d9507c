"""The playground's questions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from multilora_client.errors import AdapterNotFound

MESSAGES = [{"role": "user", "content": "Who are you?"}]


def ask(console: TestClient, *targets: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    answer = console.post("/api/ask", json={"targets": list(targets), **more})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def text_of(pieces: list[dict[str, Any]], column: int) -> str:
    return "".join(piece.get("text", "") for piece in pieces if piece["column"] == column)


def test_base_and_adapters_answer_side_by_side(console: TestClient, server: Any) -> None:
    pieces = ask(
        console,
        {"adapter": None, "messages": MESSAGES},
        {"adapter": {"lora_task_id": str(2**64 - 1)}, "messages": MESSAGES},
        {"adapter": {"lora_name": "7"}, "prompt": "Hi"},
        options={"max_tokens": 5, "temperature": 0.5, "stop_words": ["."]},
    )

    assert [text_of(pieces, column) for column in range(3)] == ["Ahoy, café"] * 3
    ends = {piece["column"]: piece["end"] for piece in pieces if "end" in piece}
    assert ends.keys() == {0, 1, 2}
    assert (ends[0]["lora_task_id"], ends[1]["lora_task_id"]) == (None, str(2**64 - 1))
    assert (ends[0]["lora_digest"], ends[1]["lora_digest"]) == ("", "ab" * 32)
    assert (ends[0]["num_input_tokens"], ends[0]["num_cached_tokens"], ends[0]["num_output_tokens"]) == (7, 4, 3)
    asked = [server.inputs(index) for index in range(3)]
    assert "lora_task_id" not in asked[0]
    assert "lora_name" not in asked[0]
    assert asked[1]["lora_task_id"] == [2**64 - 1]
    assert (asked[2]["lora_name"], asked[2]["text_input"]) == (["7"], ["Hi"])
    assert json.loads(asked[1]["messages"][0]) == MESSAGES
    assert (asked[0]["max_tokens"], asked[0]["temperature"], asked[0]["stop_words"]) == ([5], [0.5], ["."])


def test_a_version_that_is_meant_is_demanded(console: TestClient, server: Any) -> None:
    ask(
        console,
        {"adapter": {"lora_name": "pirate"}, "expected_digest": "ab" * 16, "prompt": "Hi"},
        {"adapter": {"lora_name": "pirate"}, "prompt": "Hi"},
    )
    assert [server.inputs(index).get("lora_expected_digest") for index in range(2)] == [["ab" * 16], None]


def test_one_adapters_error_ends_no_other_answer(console: TestClient, server: Any) -> None:
    server.errors[8] = AdapterNotFound("LoRA task 8 not found in cache")
    pieces = ask(
        console, {"adapter": {"lora_task_id": "8"}, "prompt": "Hi"}, {"adapter": {"lora_task_id": "7"}, "prompt": "Hi"}
    )

    assert [piece for piece in pieces if piece["column"] == 0] == [
        {"column": 0, "error": {"code": "NOT_FOUND", "message": "LoRA task 8 not found in cache"}}
    ]
    assert text_of(pieces, 1) == "Ahoy, café"


def test_tokens_come_with_log_probs_and_characters_are_whole(console: TestClient, server: Any) -> None:
    """The two bytes of é are two tokens."""
    server.pieces = ["caf", "é"]
    tokens = [["caf", "tea"], ["Ã", "x"], ["©", "\xff"]]
    server.outputs = [
        {
            "output_tokens": tokens[0],
            "output_log_probs": [-0.5],
            "cum_log_probs": [-0.5],
            "top_log_prob_ids": [1],
            "top_log_probs": [-1.5],
        },
        {
            "output_tokens": [*tokens[1], *tokens[2]],
            "output_log_probs": [-0.1, -0.2],
            "cum_log_probs": [-0.8],
            "top_log_prob_ids": [2, 3],
            "top_log_probs": [-2.5, -3.5],
        },
    ]
    pieces = ask(console, {"adapter": None, "prompt": "Hi"}, wants_log_probs=True)
    told = [token for piece in pieces for token in piece.get("tokens", [])]

    assert server.inputs()["return_log_probs"] == [True]
    assert [(token["text"], token["log_prob"]) for token in told] == [("caf", -0.5), ("", -0.1), ("é", -0.2)]
    assert [token["top"] for token in told] == [
        [{"text": "tea", "log_prob": -1.5}],
        [{"text": "x", "log_prob": -2.5}],
        [{"text": "�", "log_prob": -3.5}],
    ]


@pytest.mark.parametrize(
    "question",
    [
        {"targets": []},
        {"targets": [{"adapter": None, "prompt": "x"}] * 6},
        {"targets": [{"prompt": "x"}]},
        {"targets": [{"adapter": "pirate", "prompt": "x"}]},
        {"targets": [{"adapter": {}, "prompt": "x"}]},
        {"targets": [{"adapter": {"lora_task_id": "7", "lora_name": "x"}, "prompt": "x"}]},
        {"targets": [{"adapter": None, "prompt": "x"}], "options": {"lora_name": "x"}},
    ],
)
def test_a_question_that_leaves_open_who_is_asked_is_refused(
    console: TestClient, server: Any, question: dict[str, Any]
) -> None:
    assert console.post("/api/ask", json=question).status_code == 400
    assert server.requests == []
