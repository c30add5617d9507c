"""The one place where an application's errors become answers."""

from __future__ import annotations

import pytest
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.testclient import TestClient

from multilora_client.errors import AdapterNotFound
from multilora_client.openai.errors import Failure
from multilora_client.openai.failure_answers import answer_failures, failure_answer


def application(error: Exception) -> FastAPI:
    app = FastAPI()
    answer_failures(app)

    @app.get("/raise/{number}")
    async def fail(number: int) -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Failure(418, "no coffee", "teapot"), 418, "teapot"),
        (AdapterNotFound("LoRA task 8 not found in cache"), 404, "model_not_found"),
        (HTTPException(409, "twice"), 409, "invalid_request"),
        (RecursionError("secret"), 400, "invalid_value"),
        (ZeroDivisionError("secret"), 500, "internal"),
    ],
)
def test_every_error_has_one_shape(error: Exception, status: int, code: str) -> None:
    answer = TestClient(application(error), raise_server_exceptions=False).get("/raise/1")

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "secret" not in answer.text


def test_a_malformed_request_names_its_field() -> None:
    answer = TestClient(application(AssertionError())).get("/raise/one")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "number")


def test_a_handler_of_a_status_comes_first() -> None:
    app = application(Failure(404, "no such adapter", "not_found"))

    async def lost(_: Request, __: Exception) -> Response:
        return failure_answer(Failure(404, "no such path", "not_served", headers={"X-Lost": "yes"}))

    app.add_exception_handler(404, lost)
    client = TestClient(app)

    answer = client.get("/elsewhere")
    assert (answer.json()["error"]["code"], answer.headers["X-Lost"]) == ("not_served", "yes")
    assert client.get("/raise/1").json()["error"]["code"] == "not_found"
