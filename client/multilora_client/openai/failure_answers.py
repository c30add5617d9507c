"""Gives an application's errors the shape of a `Failure`: one place for the front and for the console."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from multilora_client.errors import MultiloraClientError
from multilora_client.openai.errors import Failure, failure_of, invalid_body


def answer_failures(app: FastAPI) -> None:
    """Have `app` answer every error as a `Failure`. A handler that it has for the error's HTTP status comes first."""
    for error in (Failure, MultiloraClientError, RequestValidationError, HTTPException, RecursionError, Exception):
        app.add_exception_handler(error, _answer)


def failure_answer(failure: Failure) -> Response:
    """The response that tells a client of `failure`."""
    return JSONResponse(failure.body, failure.status, failure.headers)


async def _answer(request: Request, error: Exception) -> Response:
    return failure_answer(_failure(request, error))


def _failure(request: Request, error: Exception) -> Failure:
    match error:
        case Failure():
            return error
        case MultiloraClientError():
            return failure_of(error)
        case RequestValidationError():
            return invalid_body(error.errors(), error.body, request.headers.get("content-type", ""))
        case HTTPException():
            return Failure(error.status_code, error.detail, "invalid_request")
        case RecursionError():
            return Failure(400, "the body is nested too deeply", "invalid_value")
        case _:
            return Failure(500, "internal error; the log says more", "internal")
