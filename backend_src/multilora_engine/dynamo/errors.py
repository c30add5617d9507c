"""The engine's errors as those of Dynamo, which its front answers a client with, or tries another worker after."""

from __future__ import annotations

from dynamo.llm.exceptions import (
    Cancelled,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Unknown,
    WorkerUnavailable,
)

_TOO_MANY_REQUESTS = 429

_BY_CODE: dict[str, type[DynamoException]] = {
    "INVALID_ARG": InvalidArgument,
    "NOT_FOUND": InvalidArgument,
    "ALREADY_EXISTS": InvalidArgument,
    "UNSUPPORTED": InvalidArgument,
    "PERMISSION_DENIED": InvalidArgument,
    "UNAUTHENTICATED": InvalidArgument,
    "UNAVAILABLE": WorkerUnavailable,
    "CANCELLED": Cancelled,
}


def dynamo_error(code: str, message: str, engine_is_gone: bool = False) -> DynamoException | HttpError:
    """The exception for an error of errors.py. engine_is_gone: another worker may go on where this one stopped."""
    text = f"[{code}] {message}"
    if engine_is_gone:
        return EngineShutdown(text)
    if code == "RESOURCE_EXHAUSTED":
        return HttpError(_TOO_MANY_REQUESTS, text)
    return _BY_CODE.get(code, Unknown)(text)
