"""The answers about models."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from multilora_client import Unavailable
from multilora_client.openai.catalogue import Catalogue

INFO = {
    "lora_task_id": 9,
    "name": "parrot",
    "digest": "",
    "status": "NOT_DOWNLOADED",
    "location": "REMOTE",
    "bytes": 0,
    "ranks": [],
    "num_pins": 0,
    "is_pinned": False,
    "last_used_s": 0.0,
    "num_hits": 0,
}


def test_the_models_are_listed_with_what_is_known_of_them(front: TestClient, user: openai.OpenAI) -> None:
    base, pirate, poet = user.models.list()

    assert [model.id for model in (base, pirate, poet)] == ["base", "pirate", "poet"]
    assert abs(base.created - time.time()) < 60
    card = front.get("/v1/models/pirate").json()
    assert (card["root"], card["parent"], card["max_model_len"]) == ("base", "base", 4096)
    assert front.get("/v1/models/base").json()["parent"] is None


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/v1/models/base"])
def test_heads_have_the_status_alone(front: TestClient, path: str) -> None:
    assert front.head(path).status_code == 200
    assert front.head("/v1/models/nobody").status_code == 404


def test_a_slash_at_the_end_changes_nothing(front: TestClient) -> None:
    assert front.get("/v1/models/").json() == front.get("/v1/models").json()


def test_the_models_are_listed_while_no_server_answers(front: TestClient, server: Any) -> None:
    server.error = Unavailable("nobody answers")
    answer = front.get("/v1/models")

    assert answer.status_code == 200
    assert {model["max_model_len"] for model in answer.json()["data"]} == {None}


def test_the_server_is_asked_for_what_requests_can_name(open_front: Callable[..., TestClient], server: Any) -> None:
    server.report |= {"adapters": [INFO], "aliases": [{"name": "chat", "members": []}]}
    front = open_front(Catalogue("base", {}))
    assert [model["id"] for model in front.get("/v1/models").json()["data"]] == ["base", "parrot", "chat"]
    assert {"operation": "list", "is_for_requests": True} in server.operations


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_an_adapter_of_the_server_that_is_called_like_the_base_model_is_no_answer_of_the_base_model(
    open_front: Callable[..., TestClient], server: Any, path: str, stream: bool
) -> None:
    front, other = open_front(Catalogue("base", {})), open_front(Catalogue("tiny", {}))
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if path.startswith("chat") else {}
    asked |= {"prompt": "Hi"} if path == "completions" else {"input": "Hi"} if path == "responses" else {}
    server.report |= {"adapters": [], "aliases": [{"name": "base", "members": []}]}
    for _ in range(2):
        answer = front.post(f"/v1/{path}", json=asked | {"model": "base", "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "ambiguous_model")
        assert "start the front with another --base-model" in answer.json()["error"]["message"]
    assert server.operations[-1] == {"operation": "list", "is_for_requests": True, "names": ["base"]}
    assert server.requests == []
    assert other.post(f"/v1/{path}", json=asked | {"model": "base", "stream": stream}).status_code == 200
    assert server.value("lora_name") == "base"


def test_the_server_is_asked_seldom_whether_it_has_an_adapter_of_the_base_models_name(
    open_front: Callable[..., TestClient], server: Any, catalogue: Catalogue
) -> None:
    for front, num_operations in ((open_front(Catalogue("base", {})), 1), (open_front(catalogue), 0)):
        server.operations.clear()
        for _ in range(3):
            assert front.post("/v1/completions", json={"model": "base", "prompt": "Hi"}).status_code == 200
        assert len(server.operations) == num_operations
