"""Text to token ids and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.api_keys import PIRATES_KEY

from multilora_client.keys import KeyRing
from multilora_client.openai.catalogue import Catalogue

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_text_becomes_tokens(front: TestClient, server: Any) -> None:
    answer = front.post("/tokenize", json={"model": "pirate", "prompt": "hi"})

    assert answer.json() == {"count": 3, "max_model_len": 4096, "tokens": [5, 6, 7], "token_strs": None}
    assert (server.value("QUERY"), server.value("ADD_SPECIAL_TOKENS")) == ("hi", True)
    front.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})
    assert server.value("ADD_SPECIAL_TOKENS") is False


def test_a_chat_becomes_tokens_by_its_template(front: TestClient, server: Any) -> None:
    tools = [{"type": "function", "function": {"name": "sky"}}]
    body = {"messages": MESSAGES, "tools": tools, "add_generation_prompt": False}
    assert front.post("/tokenize", json=body).json()["count"] == 3

    assert json.loads(server.value("MESSAGES")) == {
        "messages": MESSAGES,
        "tools": tools,
        "add_generation_prompt": False,
    }
    assert server.value("ADD_SPECIAL_TOKENS") is None
    front.post("/tokenize", json=body | {"add_special_tokens": True})
    assert server.value("ADD_SPECIAL_TOKENS") is True


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "sky"}}]])
def test_a_chat_with_tools_becomes_the_tokens_of_the_chat_that_is_answered(
    front: TestClient, server: Any, tools: list[Any]
) -> None:
    server.refuses_tools = True
    call = {"id": "1", "type": "function", "function": {"name": "sky", "arguments": "{}"}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "dry"}]
    assert front.post("/tokenize", json={"messages": messages, "tools": tools}).json()["count"] == 3
    tokenized = json.loads(server.value("MESSAGES"))
    body = {"model": "base", "messages": messages, "tools": tools}
    assert front.post("/v1/chat/completions", json=body).status_code == 200
    assert tokenized == server.chat()


def test_a_text_that_is_refused_stays_refused(front: TestClient, server: Any) -> None:
    server.refuses_tools = True
    assert front.post("/tokenize", json={"prompt": "hi"}).status_code == 200
    assert front.post("/tokenize", json={"messages": MESSAGES, "tools": []}).status_code == 200


def test_tokens_become_text(front: TestClient, server: Any) -> None:
    assert front.post("/detokenize", json={"tokens": [5, 6]}).json() == {"prompt": "Ahoy"}
    assert server.values("TOKENS_BATCH") == [5, 6]
    assert front.post("/detokenize", json={"model": "base", "tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "hi", "messages": MESSAGES}, {"prompt": "hi", "return_token_strs": True}, {"prompt": 5}]
)
def test_what_is_no_prompt_is_refused(front: TestClient, server: Any, body: dict[str, Any]) -> None:
    assert front.post("/tokenize", json=body).status_code == 400
    assert server.requests == []


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [5]})])
def test_the_tokenizer_is_for_those_who_may_use_the_model(
    open_front: Callable[..., TestClient], catalogue: Catalogue, keys: KeyRing, path: str, body: dict[str, Any]
) -> None:
    front = open_front(dataclasses.replace(catalogue, keys=keys))

    def status(key: str, **more: str) -> int:
        return front.post(path, json=body | more, headers={"Authorization": f"Bearer {key}"}).status_code

    assert status(PIRATES_KEY, model="pirate") == 200
    assert status(PIRATES_KEY) == 403
    assert status("nobody", model="pirate") == 401
    assert status(PIRATES_KEY, model="parrot") == 403
