"""Failures in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` under the status that says the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from multilora_client.errors import MultiloraClientError

_CLIENT_CLOSED_REQUEST = 499  # nginx's; HTTP itself has none
_STATUS_OF_CODE: Mapping[str, int] = {
    "INVALID_ARG": 400,
    "UNSUPPORTED": 400,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "CANCELLED": _CLIENT_CLOSED_REQUEST,
    "UNAVAILABLE": 503,
    "DEADLINE": 504,
}
_UNSUPPORTED = "unsupported_value"


class Failure(Exception):
    """What a client gets to see. `param` is the field of its request, `code` a word for programs."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failure_of(error: MultiloraClientError) -> Failure:
    """An error of the client or the server; codes without a status of their own are the server's fault."""
    return Failure(_STATUS_OF_CODE.get(error.code, 500), str(error), error.code.lower())


def invalid_body(error: Mapping[str, Any]) -> Failure:
    """The first error that pydantic found in a body, at the path `loc`; `param` is the top-level field."""
    _, *parts = error["loc"]
    path, param = ".".join(map(str, parts)), str(parts[0]) if parts else None
    code = _UNSUPPORTED if error["type"] == _UNSUPPORTED else "invalid_value"
    if error["type"] == "extra_forbidden":
        return Failure(400, f"{path} is not a parameter that this server knows", "unknown_parameter", param)
    return Failure(400, f"{path}: {error['msg']}" if path else error["msg"], code, param)


def unsupported(message: str) -> PydanticCustomError:
    """Raised by validators for what is well-formed, but would change the answer in a way this server cannot honour."""
    return PydanticCustomError(_UNSUPPORTED, "{reason}", {"reason": message})
