"""Paths that are not served answer so."""

from __future__ import annotations

import openai
import pytest
from fastapi.testclient import TestClient


@pytest.mark.parametrize(
    ("path", "service"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/images/generations", "images"),
        ("/v1/audio/speech", "audio"),
        ("/v1/fine_tuning/jobs", "training"),
        ("/rerank", "reranking"),
    ],
)
def test_other_services_of_openai_and_vllm_are_named(front: TestClient, path: str, service: str) -> None:
    answer = front.post(path, json={})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (404, "not_served", "invalid_request_error")
    assert error["message"].startswith(f"{path} is not served here: this server generates text and has no {service}")
    assert "/v1/chat/completions" in error["message"]


def test_openais_package_sees_a_missing_page(user: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="has no embeddings"):
        user.embeddings.create(model="base", input="hi")


def test_any_other_path_is_told_what_there_is(front: TestClient) -> None:
    message = front.get("/v2/" + "x" * 5000).json()["error"]["message"]
    assert "/v1/chat/completions" in message
    assert len(message) < 400


def test_a_wrong_method_is_told_the_right_one(front: TestClient) -> None:
    answer = front.get("/v1/chat/completions")

    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "GET is not served at /v1/chat/completions: use POST"
