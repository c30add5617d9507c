"""The answers about models."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from multilora_client import Unavailable


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
