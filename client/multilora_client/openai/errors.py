"""Failures in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` under the status that says the same."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from multilora_client.errors import AdapterNotFound, MultiloraClientError, RateExceeded
from multilora_wire.messages import shortened

_CLIENT_CLOSED_REQUEST = 499  # nginx's; HTTP itself has none
_STATUS_OF_CODE: Mapping[str, int] = {
    "INVALID_ARG": 400,
    "INVALID_ADAPTER": 400,
    "UNSUPPORTED": 400,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "CANCELLED": _CLIENT_CLOSED_REQUEST,
    "UNAVAILABLE": 503,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "DEADLINE": 504,
}
_UNSUPPORTED = "unsupported_value"
_INVALID = "invalid_value"
_CONTEXT_LENGTH = "context_length_exceeded"
_TOO_MANY_TOKENS = re.compile(r"the prompt has (\d+) tokens and max_model_len is (\d+)")
_TOO_MANY_BYTES = re.compile(r"has \d+ bytes and max_prompt_bytes is \d+")


class Failure(Exception):
    """The error that a client sees. `param` is the field of its request, `code` a word for programs."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        message, param = shortened(message), None if param is None else shortened(param)
        super().__init__(message)
        self.status = status
        self.headers = headers
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failure_of(error: MultiloraClientError) -> Failure:
    """An error of the client or the server; codes without a status of their own are the server's fault."""
    message = str(error)
    if lengths := _TOO_MANY_TOKENS.search(message):
        return Failure(400, _context_length_message(*lengths.groups()), _CONTEXT_LENGTH)
    if _TOO_MANY_BYTES.search(message):
        return Failure(400, message, _CONTEXT_LENGTH)
    if isinstance(error, AdapterNotFound):
        return Failure(404, message, "model_not_found", "model")
    headers = {"Retry-After": str(math.ceil(error.retry_after_s))} if isinstance(error, RateExceeded) else None
    return Failure(_STATUS_OF_CODE.get(error.code, 500), message, error.code.lower(), headers=headers)


def invalid_body(error: Mapping[str, Any], content_type: str) -> Failure:
    """The first error that pydantic found in a body, at the path `loc`; `param` is the top-level field.

    content_type: the request's, "" for none; a body that is not declared as JSON is not read as JSON.
    """
    _, *parts = error["loc"]
    context: Mapping[str, Any] = error.get("ctx", {})
    if error["type"] == "json_invalid":
        return Failure(400, f"the body is not valid JSON: {context['error']} (character {parts[0]})", "invalid_json")
    if not parts and error["type"] != _UNSUPPORTED and not _is_json(content_type):
        return Failure(415, _content_type_message(content_type), "unsupported_media_type")
    path, param = ".".join(map(str, parts)), str(parts[0]) if parts else context.get("param")
    if error["type"] == "extra_forbidden":
        return Failure(400, f"{path} is not a parameter that this server knows", "unknown_parameter", param)
    code = _UNSUPPORTED if error["type"] == _UNSUPPORTED else _INVALID
    return Failure(400, f"{path}: {error['msg']}" if path else error["msg"], code, param)


def unsupported(message: str, param: str | None = None) -> PydanticCustomError:
    """Raised by validators for a well-formed value that would change the answer in a way this server cannot honour.

    param: the field of the request, where the validator is not that field's own.
    """
    return PydanticCustomError(_UNSUPPORTED, "{reason}", {"reason": message, "param": param})


def invalid(message: str, param: str | None = None) -> PydanticCustomError:
    """Raised by validators for a value that no server could honour."""
    return PydanticCustomError(_INVALID, "{reason}", {"reason": message, "param": param})


def _context_length_message(num_tokens: str, max_model_len: str) -> str:
    return (
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {num_tokens} tokens "
        "and leaves no room for an answer. Please reduce the length of the prompt."
    )


def _content_type_message(content_type: str) -> str:
    given = f"its Content-Type is {content_type}" if content_type else "it has no Content-Type"
    return f"the body is not read as JSON, for {given}; send the header `Content-Type: application/json`"


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
