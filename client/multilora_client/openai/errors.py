"""Failures in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` under the status that says the same."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError

from multilora_client.errors import AdapterNotFound, InvalidRequest, MultiloraClientError, RateExceeded
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
_MAX_QUOTED = 60
_TOO_MANY_TOKENS = re.compile(r"the prompt has (\d+) tokens and max_model_len is (\d+)")
_TOO_LONG_SOURCE = re.compile(r"the source has \d+ tokens and ")
_TOO_MANY_BYTES = re.compile(r"; a prompt may have \d+")

_PROTOCOL_NAMES: Mapping[str, str] = {
    "bad_words_list": "bad_words",
    "embedding_bias": "logit_bias",
    "embedding_bias_ids": "logit_bias",
    "embedding_bias_weights": "logit_bias",
    "guided_decoding_guide": "the guide",
    "input_ids": "prompt",
    "num_prompt_top_log_probs": "prompt_logprobs",
    "num_return_sequences": "n",
    "num_top_log_probs": "top_logprobs",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "stop_words": "stop",
    "stop_words_list": "stop_token_ids",
    "text_input": "prompt",
}
"""The protocol's names of the server's inputs."""

_SERVER_NAME = re.compile(rf"\b({'|'.join(_PROTOCOL_NAMES)})\b")


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
    if _TOO_MANY_BYTES.search(message) or _TOO_LONG_SOURCE.search(message):
        return Failure(400, message, _CONTEXT_LENGTH)
    if isinstance(error, AdapterNotFound):
        return Failure(404, message, "model_not_found", "model")
    headers = {"Retry-After": str(math.ceil(error.retry_after_s))} if isinstance(error, RateExceeded) else None
    return Failure(_STATUS_OF_CODE.get(error.code, 500), message, error.code.lower(), headers=headers)


def invalid_body(errors: Sequence[Mapping[str, Any]], body: object, content_type: str) -> Failure:
    """The failure of a request in which pydantic found `errors`, in the words of the protocol.

    body: the JSON that was sent; pydantic tells places in it by names of our own types, too. `param` is the top-level
    field. content_type: the request's, "" for none; a body that is not declared as JSON is not read as JSON.
    """
    error, parts, message = _reason(errors, body)
    context: Mapping[str, Any] = error.get("ctx", {})
    if error["type"] == "json_invalid":
        place = error["loc"][-1]
        return Failure(400, f"the body is not valid JSON: {context['error']} (character {place})", "invalid_json")
    if not parts and error["type"] != _UNSUPPORTED and not _is_json(content_type):
        return Failure(415, _content_type_message(content_type), "unsupported_media_type")
    path, param = ".".join(parts), parts[0] if parts else context.get("param")
    if error["type"] == "extra_forbidden":
        return Failure(400, f"{path} is not a parameter that this server knows", "unknown_parameter", param)
    code = _UNSUPPORTED if error["type"] == _UNSUPPORTED else _INVALID
    return Failure(400, f"{path}: {message}" if path else message, code, param)


def reason_of(errors: Sequence[Mapping[str, Any]], body: object) -> tuple[str, str | None]:
    """The words of an error that pydantic found in `body`, and the field of the request that it names."""
    error, _, message = _reason([{**error, "loc": ("body", *error["loc"])} for error in errors], body)
    return message, error.get("ctx", {}).get("param")


def quoted(value: object) -> str:
    """A value of a request as JSON, cut to a part of a line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."


def in_protocol_words(error: InvalidRequest) -> InvalidRequest:
    """An error of the server, with the names that the protocol has for the server's inputs."""
    return type(error)(_SERVER_NAME.sub(lambda name: _PROTOCOL_NAMES[name.group()], str(error)))


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


def _reason(errors: Sequence[Mapping[str, Any]], body: object) -> tuple[Mapping[str, Any], list[str], str]:
    """The error to tell of, its path in the body, and its words.

    A field of several types has an error for each: the error of the type that was sent goes deepest. Where the value is
    of none of the types, the words name all of them.
    """
    placed = [(error, _path(error, body)) for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    error, path = max(placed, key=lambda each: (len(each[1]), each[0]["type"] not in _TYPE_WORDS))
    if error["type"] in _TYPE_WORDS or error["type"] == "literal_error":
        rivals = [each for each, its_path in placed if its_path == path]
        kinds = [_kind(each) for each in rivals if each["type"] in _TYPE_WORDS or each["type"] == "literal_error"]
        return error, path, f"must be {' or '.join(dict.fromkeys(kinds))}"
    return error, path, _words(error)


def _path(error: Mapping[str, Any], body: object) -> list[str]:
    """The members of the body that lead to an error. Other parts of its place are names of types."""
    source, *parts = error["loc"] or ("",)
    if source != "body" or error["type"] == "json_invalid":
        return [_shown(part) for part in parts if error["type"] != "json_invalid"]
    path, value = [], body
    for part in parts:
        match value:
            case dict() if part in value:
                value = value[part]
            case list() if isinstance(part, int) and part < len(value):
                value = value[part]
            case _:
                continue
        path.append(_shown(part))
    if error["type"] == "missing" and parts:
        path.append(_shown(parts[-1]))
    return path


def _shown(part: object) -> str:
    return str(part)[:_MAX_QUOTED]


_TYPE_WORDS: Mapping[str, str] = {
    "string_type": "a string",
    "string_unicode": "Unicode text",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""JSON's names of types, by pydantic's errors."""


def _kind(error: Mapping[str, Any]) -> str:
    return str(error["ctx"]["expected"]) if error["type"] == "literal_error" else _TYPE_WORDS[error["type"]]


def _words(error: Mapping[str, Any]) -> str:
    """The words of an error that is about more than a type. Those of our own validators stay as they are."""
    context: Mapping[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "missing":
            return "is required"
        case "string_too_short" | "too_short" if context["min_length"] == 1:
            return "must not be empty"
        case "string_too_long":
            return f"must have at most {context['max_length']} characters"
        case "too_long":
            return f"must have at most {context['max_length']} items"
        case "string_pattern_mismatch":
            return f"must match {context['pattern']}"
        case "greater_than":
            return f"must be greater than {context['gt']}"
        case "greater_than_equal":
            return f"must be at least {context['ge']}"
        case "less_than":
            return f"must be less than {context['lt']}"
        case "less_than_equal":
            return f"must be at most {context['le']}"
    return str(error["msg"])
